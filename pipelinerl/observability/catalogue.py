"""Every metric, declared once: name, unit, meaning and role.

Emitters and readers name a metric by its declaration: `{TrainerMetric.LOSS: 0.5}`, `point[ActorMetric.REWARD]`. The
names in `MetricsLogger.log` and `Points` are of the type `MetricName`, so the type checker refuses a bare string.
A part of a name in braces stands for any text without a slash, e.g. `dropped/{reason}`.
`python -m pipelinerl.observability.catalogue` writes docs/metrics.md.
"""

import re
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from enum import ReprEnum
from functools import cache
from typing import Any

from pipelinerl.config.rules.experiment import METRICS_OF_ALL

DOMAIN_METRIC = "{metric}"
"""The place of a metric that the domain's rollouts report."""
SPREAD = ("min", "max", "std")
"""Behind a domain's metric, its smallest and largest value and its standard deviation."""
WITH_SLASHES = ("{dataset}", "{subset}")
"""Places of texts that may hold slashes, as data sets' names do: `openai/gsm8k:main@train`, `/data/rows.jsonl`."""


class UndeclaredMetricWarning(UserWarning):
    """A role emits a metric that the catalogue does not know."""


class MetricName(str):
    """A name that a declaration gave. Only this module and the reader of metrics files make one."""


STEP, TIME = MetricName("step"), MetricName("time")
"""What every point has beside its metrics: the optimizer step or weight version, and the Unix time."""


class Metric(MetricName, ReprEnum):
    """A metric of one role. The value is its name as emitted, without the role."""

    unit: str
    meaning: str

    def __new__(cls, name: str, unit: str, meaning: str) -> "Metric":
        self = str.__new__(cls, name)
        self._value_, self.unit, self.meaning = name, unit, meaning
        return self

    @property
    def role(self) -> str:
        """The role that emits it."""
        return next(role for role, metrics in CATALOGUE.items() if isinstance(self, metrics))

    def of(self, **parts: object) -> MetricName:
        """The name with texts in the place of its braces.

        >>> ActorMetric.FAILURES.of(reason="timeout")
        'failures/timeout'
        """
        return MetricName(self.format(**parts))

    def found(self, point: Mapping[MetricName, Any]) -> dict[str, Any]:
        """The values of a point under this name, by the text in the place of its only brace."""
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "([^/]+)", re.escape(self)))
        return {match[1]: value for name, value in point.items() if (match := pattern.fullmatch(name))}


def as_texts(values: Mapping[MetricName, float]) -> dict[str, float]:
    """The same values under texts, for a record."""
    return {str(name): value for name, value in values.items()}


class ActorMetric(Metric):
    """Of role `actor`."""

    ROLLOUTS = "rollouts", "rollouts", "finished since the process began"
    ROLLOUTS_PER_S = "rollouts_per_s", "1/s", "rate since the previous point"
    GROUPS = "groups", "groups", "finished since the process began"
    GROUPS_RETRIED = "groups_retried", "groups", "with attempts that were tried again"
    GROUPS_DROPPED = "groups_dropped/{reason}", "groups", "that will never be trained, by reason"
    GROUPS_HELD = (
        "groups_held",
        "groups",
        "finished, and waiting for a domain that is behind its weight or for a weight probe",
    )
    FAILURES = "failures/{reason}", "rollouts", "failed attempts, by reason"
    REFUSED = "refused/{server}", "rollouts", "not used, because this server missed the weight probe for them"
    PUBLISHED_BEFORE_MISS = (
        "published_before_miss/{server}",
        "rollouts",
        "published for training before this server missed the weight probe for them",
    )
    DOMAIN_ERRORS = "domain_errors", "rollouts", "that the domain's own code ended, or returned without a trained token"
    LOOP_BLOCKED_S = (
        "loop_blocked_s/{domain}",
        "s",
        "for which a domain has blocked the event loop of its rollout worker, pauses above 0.5 s, over all workers",
    )
    ABORTED_REQUESTS = "aborted_requests", "requests", "that a server did not complete"
    TOKENS_GENERATED = "tokens_generated", "tokens", "of rollouts that finished since the process began"
    TOKENS_GENERATED_PER_S = (
        "tokens_generated_per_s",
        "tokens/s",
        "that servers sampled since the previous point, of answers under way and of evaluations too",
    )
    LONGEST_UNDER_WAY = "longest_under_way", "tokens", "of the longest answer that a server is sampling"
    GENERATING_S = "generating_s", "s", "time in which training rollouts were under way"
    SLOTS_HELD = (
        "slots_held",
        "share",
        "of the rollouts that servers could have had under way since the previous point, which max_lag_steps kept "
        "from starting",
    )
    WORKERS_BUSY = (
        "workers_busy",
        "share",
        "of the newest second in which a rollout worker computed, or code blocked its event loop, mean over workers",
    )
    VERSIONS_IN_ONE_ROLLOUT_MAX = (
        "versions_in_one_rollout_max",
        "versions",
        "most weight versions that sampled one rollout",
    )
    LATENCY_S = "latency_s", "s", "of a rollout"
    OUTPUT_TOKENS = "output_tokens", "tokens", "sampled in a rollout"
    OUTPUT_TOKENS_MAX = "output_tokens_max", "tokens", "sampled in the longest rollout"
    PROMPT_TOKENS = "prompt_tokens", "tokens", "of a rollout that were not sampled"
    LLM_CALLS = "llm_calls", "calls", "of a rollout"
    PREFIX_HIT_RATE = "prefix_hit_rate", "share", "of the prompt tokens of all calls that servers found computed"
    UNMERGED_TURNS = "unmerged_turns", "turns", "of a rollout that became training sequences of their own"
    FORKS = (
        "forks",
        "calls",
        "of a rollout whose prompt changed its conversation's history, so that tokens are read again",
    )
    COMPACTED = (
        "compacted",
        "calls",
        "of a rollout whose prompt changed its conversation's history and is shorter than before: no fork",
    )
    ANSWERS_FROM_JOURNAL = (
        "answers_from_journal",
        "answers",
        "of rollouts that finished since the process began, got before a crash and not sampled again",
    )
    DIVERGED = (
        "diverged",
        "rollouts",
        "finished since the process began that asked for something else after a crash than before, and started anew",
    )
    CUT_BY_LENGTH = "cut_by_length", "share", "of rollouts with a completion that the server cut for its length"
    ROLLOUTS_UNDER_WAY = "rollouts_under_way", "rollouts", "at this time"
    ROLLOUTS_ENDED = "rollouts_ended", "rollouts", "of training that ended, whether their groups have ended or not"
    SAMPLES_DISPATCHED = "samples_dispatched", "rollouts", "started for training"
    SAMPLES_PUBLISHED = "samples_published", "rollouts", "finished and published for training"
    SAMPLES_DROPPED = "samples_dropped", "rollouts", "that will never be trained, in the actor and behind it"
    EPOCH = "epoch", "epochs", "of the training problems, or rounds that actor.sampler drew"
    VERSION = "version", "version", "of the live weights, -1 before the first"
    PROBLEMS_REMOVED = "problems_removed", "problems", "that left the pool because they are solved"
    PROBLEMS_TRIED = "problems_tried", "problems", "of which a group has ended, with actor.sampler"
    POOL_SIZE = (
        "pool_size",
        "problems",
        "from which actor.sampler draws: (Σw)² / Σw² of its weights w, the number of problems if all weigh the same",
    )
    MIX = "mix/{domain}", "share", "of a domain in the samples that are published and not dropped since"
    REWARD = "reward", "", "mean reward of a rollout"
    SUCCESS = "success", "share", "of rollouts that succeeded"
    NO_ERROR = "no_error", "share", "of rollouts without an error, as the domain reports it"
    NO_ANSWER = "no_answer", "share", "of rollouts without an answer, as the domain reports it"
    OF_DOMAIN = "{metric}", "", "mean of any other metric that the domain reports"
    OF_DOMAIN_MIN = "{metric}_min", "", "smallest value of a metric that the domain reports, reward among them"
    OF_DOMAIN_MAX = "{metric}_max", "", "its largest value"
    OF_DOMAIN_STD = "{metric}_std", "", "its standard deviation"
    GROUPS_ALWAYS_SOLVED = "groups_always_solved", "share", "of the newest groups whose attempts all succeeded"
    GROUPS_NEVER_SOLVED = "groups_never_solved", "share", "of the newest groups none of whose attempts succeeded"
    OF_SUBSET = "{subset}/{metric}", "", "the domain's metrics of one domain or data set, where there are several"
    SUBSET_LATENCY_S = "{subset}/latency_s", "s", "of a rollout of one domain or data set, where there are several"
    EVAL_SUCCESS = "eval/success", "share", "of evaluation rollouts that succeeded"
    EVAL_REWARD = "eval/reward", "", "mean reward of an evaluation rollout"
    EVAL_COMPLETE = "eval/complete", "share", "of the evaluation's rollouts that were finished"
    EVAL_OF_DATASET = "eval/{dataset}/{metric}", "", "the domain's metrics of one test data set"
    EVAL_OF_DOMAIN_AND_DATASET = "eval/{domain}/{dataset}/{metric}", "", "the same where there are several domains"


class PreprocessorMetric(Metric):
    """Of role `preprocessor`."""

    SAMPLES = "samples", "rollouts", "in the optimizer batch"
    SEQUENCES = "sequences", "sequences", "in the optimizer batch"
    TOKENS = "tokens", "tokens", "in the optimizer batch"
    TOKENS_TRAINED = "tokens_trained", "tokens", "in the optimizer batch that were sampled"
    TOKENS_PER_S = "tokens_per_s", "tokens/s", "tokens of the batch per time since the previous batch"
    REWARD = "reward", "", "mean over the batch"
    ADVANTAGE_STD = "advantage_std", "", "standard deviation of the batch's advantages"
    ZERO_WEIGHT = "zero_weight", "rollouts", "in the batch that have weight 0"
    PACKED_LAG_MEAN = "packed_lag_mean", "steps", "between the batch and the oldest token of a rollout, mean"
    PACKED_LAG_MAX = "packed_lag_max", "steps", "between the batch and its oldest token"
    TEACHER_LAG_MEAN = (
        "teacher_lag_mean",
        "steps",
        "between the batch and the version up to which its teacher, an average of the policy, had followed; mean over "
        "tokens",
    )
    MICRO_BATCHES = "micro_batches", "micro-batches", "of the batch over all ranks"
    EMPTY_MICRO_BATCHES = "sentinels", "micro-batches", "without data, which keep the ranks in step"
    FILLED = "filled", "share", "of the micro-batches' capacity that tokens fill"
    RANK_IMBALANCE = "rank_imbalance", "share", "largest deviation of a rank's tokens from the mean"
    LOCKSTEP = "lockstep", "share", "of the time that the ranks compute, when each round lasts as long as its longest"
    DROPPED = "dropped/{reason}", "rollouts", "that will not be trained, by reason, since the run began"
    DROPPED_BY_LENGTH = (
        "dropped_by_length/{decile}",
        "share",
        "of the sampled tokens of the shortest (1) to the longest (10) tenth of the last 2,000 rollouts that "
        "preprocess.lag_drop takes away, mean over the rollouts",
    )
    TOKENS_MASKED_BY_LAG = (
        "tokens_masked_by_lag",
        "tokens",
        "of the batch's rollouts that are not trained since they are too old",
    )
    SFT_ROWS = "sft_rows", "rows", "of sft.datasets that are imitated, or whose turn has not come"
    SFT_ROWS_LEFT_OUT = "sft_rows_left_out", "rows", "of sft.datasets that are not, for the reasons in the log"
    SURVIVORSHIP_COUNT = "survivorship/{outcome}/count", "rollouts", "that had this outcome since the previous batch"
    SURVIVORSHIP_MEAN_TOKENS = "survivorship/{outcome}/mean_tokens", "tokens", "sampled in a rollout of this outcome"
    SURVIVORSHIP_MEAN_REWARD = "survivorship/{outcome}/mean_reward", "", "of the rollouts of this outcome"


class TrainerMetric(Metric):
    """Of role `finetune`."""

    LOSS = "loss", "", "sum over the batch as the aggregation weights it"
    VALUE_LOSS = "value_loss", "", "loss of the value head"
    SAMPLES = "samples", "rollouts", "trained since the run began"
    TOKENS = "tokens", "tokens", "trained in the step: they were sampled and carry a loss"
    SEQUENCES = "sequences", "sequences", "trained in the step"
    SFT_TOKENS = "sft_tokens", "tokens", "of conversations that are imitated, trained in the step"
    SFT_LOSS = "sft_loss", "nats", "mean of −log π over them, by their weights"
    SFT_TEST_LOSS = "sft_test_loss", "nats", "the same over `sft.test_datasets`, after the step; of step 0 before it"
    INPUT_TOKENS = "input_tokens", "tokens", "of the step's sequences, prompts included"
    SHARED_TOKENS = "shared_tokens", "tokens", "of these that were not computed again (`finetune.share_prefixes`)"
    PADDING_FRACTION = "padding_fraction", "share", "of the computed positions that are padding"
    MICRO_BATCHES = "micro_batches", "micro-batches", "of one rank"
    REWARD = "reward", "", "mean over the sequences of the step"
    ENTROPY = "entropy", "nats", "of the policy at the training temperature, mean over tokens"
    ENTROPY_BONUS = "entropy_bonus", "", "weight of the entropy bonus in this step"
    KL_REF = "kl_ref", "nats", "KL to the reference model, mean over tokens (§3)"
    KL_TEACHER = "kl_teacher", "nats", "log π − log π_T, mean over tokens: KL to the teacher, if there is one (§3)"
    TEACHER_GAP = "teacher_gap", "nats", "mean size of log π − log π_T over tokens: what the teacher teaches, and noise"
    TEACHER_NOISE = (
        "teacher_noise",
        "nats",
        "the part of `teacher_gap` that a teacher with the policy's own weights would have: mean size of the "
        "difference between server and trainer over the newest weight probes (§3)",
    )
    KL_COEF = "kl_coef", "", "weight of the KL term in this step"
    ESS = "ess", "share", "effective sample size over tokens, (Σρ)² / (N Σρ²); 1 on policy"
    ESS_SEQUENCE = "ess_sequence", "share", "the same over sequences, where ρ is the product over the tokens"
    KL_K1 = "kl_k1", "nats", "mean of log μ − log π"
    KL_K3 = "kl_k3", "nats", "mean of ρ − log ρ − 1, an estimate of KL(μ‖π)"
    CHI_SQUARED = "chi_squared", "", "mean of ρ² − 1"
    LOGRATIO_ABS_MEAN = "logratio_abs_mean", "nats", "mean size of log ρ"
    LOGRATIO_ABS_MAX = "logratio_abs_max", "nats", "largest size of log ρ"
    LOGRATIO_ABS_MAX_LAG0 = (
        "logratio_abs_max_lag0",
        "nats",
        "the same over sequences that the current version sampled alone. It measures nothing but numerical "
        "difference between server and trainer",
    )
    CLIP_FRACTION = "clip_fraction", "share", "of tokens on which the loss's clip acts"
    CLIP_FRACTION_LAG0 = (
        "clip_fraction_lag0",
        "share",
        "of the tokens of such sequences on which it acts: numerical noise",
    )
    CORRECTED_FRACTION = "corrected_fraction", "share", "of tokens that an off-policy correction truncates or drops"
    LAG_MIN = "lag_min", "steps", "smallest lag of a token: from the version that sampled it to the one that trains it"
    LAG_MEAN = "lag_mean", "steps", "mean lag of a token"
    LAG_MAX = "lag_max", "steps", "largest lag of a token"
    LAG_IN_FLIGHT_MEAN = (
        "lag_in_flight_mean",
        "steps",
        "the part of the lag that passed while the sequence was generated",
    )
    LAG_QUEUED_MEAN = "lag_queued_mean", "steps", "the rest of the lag"
    LAG_HISTOGRAM = (
        "lag_histogram/{part}/{bin}",
        "share",
        "of tokens with a lag in the bin (0, 1, 2, 3-4, 5-8, 9-16, 17+), of the whole lag (`trained`) and of its "
        "parts (`in_flight`, `queued`)",
    )
    GRAD_NORM = "grad_norm", "", "norm of the gradient before clipping"
    LR = "lr", "", "learning rate of the step"
    LOSS_SCALE = "loss_scale", "", "by which the next step multiplies its loss (`finetune.dtype=float16`)"
    SKIPPED_STEPS = (
        "skipped_steps",
        "steps",
        "of the run whose gradient overflowed in float16, so that no weight changed",
    )
    STEP_S = "step_s", "s", "computation of the step"
    TOKENS_PER_S = "tokens_per_s", "tokens/s", "trained tokens per second of computation"
    INPUT_TOKENS_PER_S_PER_DEVICE = (
        "input_tokens_per_s_per_device",
        "tokens/s",
        "tokens, prompts included, per second of computation and rank",
    )
    MFU = "mfu", "share", "of the GPU's peak that 6 operations per active parameter and token used"
    WAIT_S = "wait_s", "s", "wait of the trainer for data before the step"
    PUSH_WAIT_S = (
        "push_wait_s",
        "s",
        "training stood still after the step: snapshot for servers, scores of the probe unless data were missing",
    )
    PAUSE_MS = "pause_ms", "ms", "stall of decoding during the newest weight update, measured in the server"
    TRANSFER_MS = "transfer_ms", "ms", "transfer of the newest weight update, while the server decodes"
    NCCL_GROUPS_FAILED = (
        "nccl_groups_failed/{interface}",
        "groups",
        "of weights.backend=nccl that did not form or broke since the process began: their bytes came over TCP through "
        "this interface, and they are tried again",
    )
    LIVE_VERSION = "live_version", "version", "of the weights that the servers hold"


CATALOGUE: Mapping[str, type[Metric]] = {
    "actor": ActorMetric,
    "preprocessor": PreprocessorMetric,
    "finetune": TrainerMetric,
}


_OF_THE_RUN: set[str] = {STEP, TIME, *(name for name in ActorMetric if not re.search(r"[{/]", name))}
TAKEN = frozenset(_OF_THE_RUN.difference(METRICS_OF_ALL))
"""Names that the actor's points have for something else than a metric of the domain."""


def is_clear(name: str) -> bool:
    """Whether a point of the actor can have a metric of the domain under its own name."""
    return name not in TAKEN and "/" not in name and bool(name)


def unclear_metrics(names: Collection[str]) -> str | None:
    """Says which of a domain's metrics could not be told apart from another value, and what to do. None: all can."""
    for name in sorted(names):
        of, _, end = name.rpartition("_")
        if name in TAKEN:
            return f"metric {name!r} has the name of a number that the run itself reports: rename it"
        if not is_clear(name):
            return (
                f"metric {name!r} is empty or has a slash, which stands behind a domain's or data set's name: rename it"
            )
        if end in SPREAD and of in names:
            return f"metric {name!r} has the name of the {end} of the metric {of!r} over rollouts: rename it"
    return None


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
    return tuple(re.compile(_pattern(metric, given), re.DOTALL) for metric in CATALOGUE.get(role, ()))


def _pattern(name: str, given: str) -> str:
    of_place = {DOMAIN_METRIC: f"(?:{given})"} | dict.fromkeys(WITH_SLASHES, ".+")
    parts = re.split(r"(\{\w+\})", name)
    return "".join(of_place.get(part, "[^/]+") if part.startswith("{") else re.escape(part) for part in parts)


def metrics_page() -> str:
    """A table per role."""
    return "\n\n".join(_table(role, metrics) for role, metrics in CATALOGUE.items())


def _table(role: str, metrics: Iterable[Metric]) -> str:
    rows = [f"| `{metric}` | {metric.unit} | {metric.meaning} |" for metric in metrics]
    return "\n".join([f"## `{role}`", "", "| metric | unit | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    from pipelinerl.config.docs import write_pages

    sys.exit(write_pages("Write the page of the metrics.", lambda: {"docs/metrics.md": metrics_page()}))
