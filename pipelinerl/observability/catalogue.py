"""Every metric, declared once: name, unit and meaning.

A role emits only what is declared here. `MetricsLogger` warns of another name, and the warning is an error in tests.
A part of a name in braces stands for any text without a slash, e.g. `dropped/{reason}`.
`python -m pipelinerl.observability.catalogue` writes docs/metrics.md.
"""

import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

DOMAIN_METRIC = "{metric}"
"""The place of a metric that the domain's rollouts report."""


class UndeclaredMetricWarning(UserWarning):
    """A role emits a metric that the catalogue does not know."""


@dataclass(frozen=True)
class Metric:
    """A metric of one role."""

    name: str
    """As emitted, without the role; `{…}` stands for a part that is known only at run time."""
    unit: str
    meaning: str


CATALOGUE: Mapping[str, tuple[Metric, ...]] = {
    "actor": (
        Metric("rollouts", "rollouts", "finished since the process began"),
        Metric("rollouts_per_s", "1/s", "rate since the previous point"),
        Metric("groups", "groups", "finished since the process began"),
        Metric("groups_retried", "groups", "with attempts that were tried again"),
        Metric("groups_dropped/{reason}", "groups", "that will never be trained, by reason"),
        Metric("groups_held", "groups", "finished, and waiting for a domain that is behind its weight"),
        Metric("failures/{reason}", "rollouts", "failed attempts, by reason"),
        Metric("domain_errors", "exceptions", "of the domain's own code"),
        Metric("aborted_requests", "requests", "that a server did not complete"),
        Metric("tokens_generated", "tokens", "sampled since the process began"),
        Metric("tokens_generated_per_s", "tokens/s", "rate since the previous point"),
        Metric("generating_s", "s", "time in which training rollouts were under way"),
        Metric("versions_in_one_rollout_max", "versions", "most weight versions that sampled one rollout"),
        Metric("latency_s", "s", "of a rollout"),
        Metric("output_tokens", "tokens", "sampled in a rollout"),
        Metric("output_tokens_max", "tokens", "sampled in the longest rollout"),
        Metric("prompt_tokens", "tokens", "of a rollout that were not sampled"),
        Metric("llm_calls", "calls", "of a rollout"),
        Metric("prefix_hit_rate", "share", "of the prompt tokens of all calls that servers found computed"),
        Metric("unmerged_turns", "turns", "of a rollout that became training sequences of their own"),
        Metric("cut_by_length", "share", "of rollouts with a completion that the server cut for its length"),
        Metric("rollouts_under_way", "rollouts", "at this time"),
        Metric("samples_dispatched", "rollouts", "started for training"),
        Metric("samples_published", "rollouts", "finished and published for training"),
        Metric("samples_dropped", "rollouts", "that will never be trained, in the actor and behind it"),
        Metric("epoch", "epochs", "of the training problems"),
        Metric("version", "version", "of the live weights, -1 before the first"),
        Metric("problems_removed", "problems", "that left the pool because they are solved"),
        Metric("mix/{domain}", "share", "of a domain in the samples that are published and not dropped since"),
        Metric("reward", "", "mean reward of a rollout"),
        Metric("success", "share", "of rollouts that succeeded"),
        Metric("no_error", "share", "of rollouts without an error, as the domain reports it"),
        Metric("no_answer", "share", "of rollouts without an answer, as the domain reports it"),
        Metric(DOMAIN_METRIC, "", "mean of any other metric that the domain reports"),
        Metric(f"{DOMAIN_METRIC}_min", "", "smallest value of a metric that the domain reports, reward among them"),
        Metric(f"{DOMAIN_METRIC}_max", "", "its largest value"),
        Metric(f"{DOMAIN_METRIC}_std", "", "its standard deviation"),
        Metric("groups_always_solved", "share", "of the newest groups whose attempts all succeeded"),
        Metric("groups_never_solved", "share", "of the newest groups none of whose attempts succeeded"),
        Metric(
            f"{{part}}/{DOMAIN_METRIC}", "", "the domain's metrics of one domain or data set, where there are several"
        ),
        Metric("{part}/latency_s", "s", "of a rollout of one domain or data set, where there are several"),
        Metric("eval/success", "share", "of evaluation rollouts that succeeded"),
        Metric("eval/reward", "", "mean reward of an evaluation rollout"),
        Metric("eval/complete", "share", "of the evaluation's rollouts that were finished"),
        Metric(f"eval/{{dataset}}/{DOMAIN_METRIC}", "", "the domain's metrics of one test data set"),
        Metric(f"eval/{{domain}}/{{dataset}}/{DOMAIN_METRIC}", "", "the same where there are several domains"),
    ),
    "preprocessor": (
        Metric("samples", "rollouts", "in the optimizer batch"),
        Metric("sequences", "sequences", "in the optimizer batch"),
        Metric("tokens", "tokens", "in the optimizer batch"),
        Metric("tokens_trained", "tokens", "in the optimizer batch that were sampled"),
        Metric("tokens_per_s", "tokens/s", "tokens of the batch per time since the previous batch"),
        Metric("reward", "", "mean over the batch"),
        Metric("advantage_std", "", "standard deviation of the batch's advantages"),
        Metric("zero_weight", "rollouts", "in the batch that have weight 0"),
        Metric("packed_lag_mean", "steps", "between the batch and the oldest token of a rollout, mean"),
        Metric("packed_lag_max", "steps", "between the batch and its oldest token"),
        Metric("micro_batches", "micro-batches", "of the batch over all ranks"),
        Metric("sentinels", "micro-batches", "without data, which keep the ranks in step"),
        Metric("filled", "share", "of the micro-batches' capacity that tokens fill"),
        Metric("rank_imbalance", "share", "largest deviation of a rank's tokens from the mean"),
        Metric("lockstep", "share", "of the time that the ranks compute, when each round lasts as long as its longest"),
        Metric("dropped/{reason}", "rollouts", "that will not be trained, by reason, since the run began"),
        Metric(
            "dropped_by_length/{decile}",
            "share",
            "of the sampled tokens of the shortest (1) to the longest (10) tenth of the last 2,000 rollouts that "
            "max_lag_steps takes away, mean over the rollouts",
        ),
        Metric("tokens_masked_by_lag", "tokens", "of the batch's rollouts that are not trained since they are too old"),
        Metric("survivorship/{fate}/count", "rollouts", "that met this fate since the previous batch"),
        Metric("survivorship/{fate}/mean_tokens", "tokens", "sampled in a rollout of this fate"),
        Metric("survivorship/{fate}/mean_reward", "", "of the rollouts of this fate"),
    ),
    "finetune": (
        Metric("loss", "", "sum over the batch as the aggregation weights it"),
        Metric("value_loss", "", "loss of the value head"),
        Metric("samples", "rollouts", "trained since the run began"),
        Metric("tokens", "tokens", "trained in the step: they were sampled and carry a loss"),
        Metric("sequences", "sequences", "trained in the step"),
        Metric("input_tokens", "tokens", "that went through the model in the step"),
        Metric("padding_fraction", "share", "of the computed positions that are padding"),
        Metric("micro_batches", "micro-batches", "of one rank"),
        Metric("reward", "", "mean over the sequences of the step"),
        Metric("entropy", "nats", "of the policy at the training temperature, mean over tokens"),
        Metric("entropy_bonus", "", "weight of the entropy bonus in this step"),
        Metric("kl_ref", "nats", "KL to the reference model, mean over tokens (§3)"),
        Metric("kl_coef", "", "weight of the KL term in this step"),
        Metric("ess", "share", "effective sample size over tokens, (Σρ)² / (N Σρ²); 1 on policy"),
        Metric("ess_sequence", "share", "the same over sequences, where ρ is the product over the tokens"),
        Metric("kl_k1", "nats", "mean of log μ − log π"),
        Metric("kl_k3", "nats", "mean of ρ − log ρ − 1, an estimate of KL(μ‖π)"),
        Metric("chi_squared", "", "mean of ρ² − 1"),
        Metric("logratio_abs_mean", "nats", "mean size of log ρ"),
        Metric("logratio_abs_max", "nats", "largest size of log ρ"),
        Metric(
            "logratio_abs_max_lag0",
            "nats",
            "the same over sequences that the current version sampled alone. It measures nothing but numerical "
            "difference between server and trainer",
        ),
        Metric("clip_fraction", "share", "of tokens on which the loss's clip acts"),
        Metric("clip_fraction_lag0", "share", "of the tokens of such sequences on which it acts: numerical noise"),
        Metric("corrected_fraction", "share", "of tokens that an off-policy correction truncates or drops"),
        Metric(
            "lag_min", "steps", "smallest lag of a token: from the version that sampled it to the one that trains it"
        ),
        Metric("lag_mean", "steps", "mean lag of a token"),
        Metric("lag_max", "steps", "largest lag of a token"),
        Metric("lag_in_flight_mean", "steps", "the part of the lag that passed while the sequence was generated"),
        Metric("lag_queued_mean", "steps", "the rest of the lag"),
        Metric(
            "lag_histogram/{part}/{bin}",
            "share",
            "of tokens with a lag in the bin (0, 1, 2, 3-4, 5-8, 9-16, 17+), of the whole lag (`trained`) and of its "
            "parts (`in_flight`, `queued`)",
        ),
        Metric("grad_norm", "", "norm of the gradient before clipping"),
        Metric("lr", "", "learning rate of the step"),
        Metric("step_s", "s", "computation of the step"),
        Metric("tokens_per_s", "tokens/s", "trained tokens per second of computation"),
        Metric(
            "input_tokens_per_s_per_device", "tokens/s", "tokens, prompts included, per second of computation and rank"
        ),
        Metric("mfu", "share", "of the GPU's peak that 6 operations per active parameter and token used"),
        Metric("wait_s", "s", "wait of the trainer for data before the step"),
        Metric("push_wait_s", "s", "training stood still for the weight update after the step: its snapshot"),
        Metric("pause_ms", "ms", "stall of decoding during the newest weight update, measured in the server"),
        Metric("transfer_ms", "ms", "transfer of the newest weight update, while the server decodes"),
        Metric("live_version", "version", "of the weights that the servers hold"),
    ),
}


def undeclared(role: str, names: Iterable[str], domain_metrics: Collection[str] | None = None) -> list[str]:
    """Names that the role does not declare.

    Args:
        role: kind of the role, e.g. `actor`; a replica's number after it does not count.
        domain_metrics: the metrics that the domain reports; None = any name may be one.
    """
    patterns = _patterns(re.sub(r"_\d+$", "", role), None if domain_metrics is None else tuple(sorted(domain_metrics)))
    return [name for name in names if not any(pattern.fullmatch(name) for pattern in patterns)]


def warn_undeclared(role: str, names: Iterable[str]) -> None:
    """Warn of every name that the role does not declare."""
    for name in undeclared(role, names):
        text = f"metric {name!r} of {role} is not declared: add it to pipelinerl/observability/catalogue.py"
        warnings.warn(text, UndeclaredMetricWarning, stacklevel=3)


@cache
def _patterns(role: str, domain_metrics: tuple[str, ...] | None) -> tuple[re.Pattern[str], ...]:
    given = "[^/]+" if domain_metrics is None else "|".join(map(re.escape, domain_metrics)) or "(?!)"
    return tuple(re.compile(_pattern(metric.name, given)) for metric in CATALOGUE.get(role, ()))


def _pattern(name: str, given: str) -> str:
    parts = re.split(r"(\{\w+\})", name)
    return "".join(
        f"(?:{given})" if part == DOMAIN_METRIC else "[^/]+" if part.startswith("{") else re.escape(part)
        for part in parts
    )


def markdown() -> str:
    """A table per role."""
    return "\n\n".join(_table(role, metrics) for role, metrics in CATALOGUE.items())


def _table(role: str, metrics: Iterable[Metric]) -> str:
    rows = [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
    return "\n".join([f"## `{role}`", "", "| metric | unit | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    from pipelinerl.config.docs import write_pages

    sys.exit(write_pages("Write the page of the metrics.", lambda: {"docs/metrics.md": markdown()}))
