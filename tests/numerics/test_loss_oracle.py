"""Every loss × aggregation × correction × {without, with KL and entropy} against a float64 oracle: values, gradients.

The oracle shares nothing with the code: it takes the full softmax, goes token by token in plain Python over whole
rollouts, and aggregates by the words of docs/algorithms.md §4. The code under test gets packed segments, a weight per
segment, and a head that sees five tokens at a time.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipelinerl.finetune.rl.head import OutputHead, head_loss
from pipelinerl.finetune.rl.objective import LossSettings, PolicyObjective
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.preprocess.collate import Members, rollout_weights

VOCAB, HIDDEN, TEMPERATURE = 37, 6, 0.7
LOSSES = ("reinforce", "ppo", "gspo", "decoupled_ppo", "ppo with π_prox", "gspo with π_prox")
AGGREGATIONS = ("sum_over_batch", "sum_over_texts", "token_mean", "sample_mean", "prompt_mean")
CORRECTIONS = {
    "none": {},
    "token_tis": {"token_tis": 1.2},
    "sequence_tis": {"sequence_tis": 1.5},
    "token_mis": {"token_mis": 1.3},
    "token_mis both sides": {"token_mis": 1.3, "token_mis_low": 0.8},
    "sequence_mis": {"sequence_mis": 2.0},
    "veto": {"veto": 0.55},
    "token_tis+veto": {"token_tis": 1.2, "veto": 0.55},
    "token_mis+sequence_tis": {"token_mis": 1.3, "sequence_tis": 1.5},
    "token_tis+sequence_mis": {"token_tis": 1.2, "sequence_mis": 2.0},
    "token_mis+sequence_mis": {"token_mis": 1.3, "sequence_mis": 2.0},
    "sequence_mis+veto": {"sequence_mis": 2.0, "veto": 0.55},
}
EXTRAS = {"plain": {}, "kl+entropy": {"kl_coef": 0.13, "kl_clamp": 0.8, "entropy_bonus": 0.07}}
RATIO_CLAMP, EPSILON_LOW, EPSILON_HIGH = 1.4, 0.2, 0.28


@dataclass
class Rollout:
    group: str
    advantage: float
    sequences: list[list[int]]
    """Indices of each sequence's trained tokens in the flat arrays."""


@dataclass
class Case:
    rollouts: list[Rollout]
    hidden: Tensor
    targets: Tensor
    log_mu: Tensor
    log_ref: Tensor
    log_prox: Tensor


@pytest.fixture(scope="module")
def head() -> OutputHead:
    torch.manual_seed(1)
    return OutputHead.wrap(nn.Linear(HIDDEN, VOCAB, dtype=torch.float64))


@pytest.fixture(scope="module")
def case(head: OutputHead) -> Case:
    """Three groups; rollouts of one to three sequences of 1 to 7 tokens; ratios on both sides of every bound."""
    rng = np.random.default_rng(3)
    torch.manual_seed(2)
    rollouts, count = [], 0
    for group, members in (("a", 3), ("b", 2), ("c", 1)):
        for _ in range(members):
            sequences = []
            for length in rng.integers(1, 8, rng.integers(1, 4)):
                sequences.append(list(range(count, count + int(length))))
                count += int(length)
            rollouts.append(Rollout(group, float(rng.normal()), sequences))
    hidden = torch.randn(count, HIDDEN, dtype=torch.float64)
    targets = torch.from_numpy(rng.integers(0, VOCAB, count))
    with torch.no_grad():
        log_pi = (head(hidden) / TEMPERATURE).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    spread = torch.from_numpy(rng.normal(0, 0.6, count))
    log_ref = log_pi + torch.from_numpy(rng.normal(0, 0.7, count))
    log_prox = log_pi + torch.from_numpy(rng.normal(0, 0.4, count))
    return Case(rollouts, hidden, targets, log_pi + spread, log_ref, log_prox)


# --- the oracle


def policy_term(
    name: str,
    settings: dict[str, float],
    log_pi: list[Tensor],
    log_mu: list[float],
    log_prox: list[float],
    t: int,
    A: float,
) -> Tensor:
    """Loss of token t of a sequence, corrections included."""
    if name == "reinforce":
        return -weight(settings, values(log_pi), log_mu, t, RATIO_CLAMP) * A * log_pi[t]
    if name in ("ppo", "gspo"):  # the ratio to μ is in the clip: corrections can only drop the token
        reference, outside = log_mu, mask(settings, values(log_pi), log_mu, t)
    else:
        reference = values(log_pi) if name == "decoupled_ppo" else log_prox
        outside = weight(settings, reference, log_mu, t, None)
    if name.startswith("gspo"):
        total = sum(((p - m) for p, m in zip(log_pi, reference, strict=True)), torch.zeros((), dtype=torch.float64))
        return outside * clipped(torch.exp(total / len(log_pi)), A)
    return outside * clipped(torch.exp(log_pi[t] - reference[t]), A)


def values(log_pi: list[Tensor]) -> list[float]:
    return [x.item() for x in log_pi]


def clipped(ratio: Tensor, advantage: float) -> Tensor:
    inside = ratio
    if ratio.item() < 1 - EPSILON_LOW:
        inside = torch.tensor(1 - EPSILON_LOW, dtype=torch.float64)
    if ratio.item() > 1 + EPSILON_HIGH:
        inside = torch.tensor(1 + EPSILON_HIGH, dtype=torch.float64)
    plain, bounded = ratio * advantage, inside * advantage
    return -(plain if plain.item() <= bounded.item() else bounded)


def mask(settings: dict[str, float], base: list[float], log_mu: list[float], t: int) -> float:
    ratios = [math.exp(p - m) for p, m in zip(base, log_mu, strict=True)]
    dropped = (
        ratios[t] > settings.get("token_mis", math.inf)
        or ratios[t] < settings.get("token_mis_low", 0.0)
        or math.prod(ratios) > settings.get("sequence_mis", math.inf)
        or min(ratios) < settings.get("veto", 0.0)
    )
    return 0.0 if dropped else 1.0


def weight(settings: dict[str, float], base: list[float], log_mu: list[float], t: int, clamp: float | None) -> float:
    """The ratio, counted once: the sequence's where only its form bounds it; a mask takes the place of the clamp."""
    ratios = [math.exp(p - m) for p, m in zip(base, log_mu, strict=True)]
    if "token_tis" in settings:
        found = min(ratios[t], settings["token_tis"])
    elif "sequence_tis" in settings:
        found = min(math.prod(ratios), settings["sequence_tis"])
    elif "token_mis" in settings:
        found, clamp = ratios[t], None
    elif "sequence_mis" in settings:
        found, clamp = math.prod(ratios), None
    else:
        found = ratios[t]
    return min(found, clamp or math.inf) * mask(settings, base, log_mu, t)


def kl_term(settings: dict[str, float], log_pi: Tensor, log_ref: float) -> Tensor:
    d = log_ref - log_pi
    bound = settings["kl_clamp"]
    if abs(d.item()) > bound:
        d = torch.tensor(math.copysign(bound, d.item()), dtype=torch.float64)
    return settings["kl_coef"] * (torch.exp(d) - d - 1)


def oracle(
    case: Case, weight: Tensor, bias: Tensor, hidden: Tensor, name: str, aggregation: str, settings: dict[str, float]
) -> Tensor:
    log_p = ((hidden @ weight.T + bias) / TEMPERATURE).log_softmax(-1)
    per_rollout = []
    for rollout in case.rollouts:
        total = torch.zeros((), dtype=torch.float64)
        for sequence in rollout.sequences:
            log_pi = [log_p[i, case.targets[i]] for i in sequence]
            log_mu = [case.log_mu[i].item() for i in sequence]
            log_prox = [case.log_prox[i].item() for i in sequence]
            for t, i in enumerate(sequence):
                loss = policy_term(name, settings, log_pi, log_mu, log_prox, t, rollout.advantage)
                if "kl_coef" in settings:
                    loss = loss + kl_term(settings, log_pi[t], case.log_ref[i].item())
                    entropy = -(log_p[i].exp() * log_p[i]).sum()
                    loss = loss - settings["entropy_bonus"] * entropy
                total = total + loss
        per_rollout.append((rollout, sum(len(s) for s in rollout.sequences), total))
    return aggregate(aggregation, per_rollout)


def aggregate(kind: str, per_rollout: list[tuple[Rollout, int, Tensor]]) -> Tensor:
    if kind == "sum_over_batch":
        return sum(total for _, _, total in per_rollout) / len(per_rollout)
    if kind == "sum_over_texts":
        return sum(total for _, _, total in per_rollout) / sum(len(rollout.sequences) for rollout, _, _ in per_rollout)
    if kind == "token_mean":
        return sum(total for _, _, total in per_rollout) / sum(tokens for _, tokens, _ in per_rollout)
    if kind == "sample_mean":
        return sum(total / tokens for _, tokens, total in per_rollout) / len(per_rollout)
    groups = sorted({rollout.group for rollout, _, _ in per_rollout})
    means = []
    for group in groups:
        members = [(tokens, total) for rollout, tokens, total in per_rollout if rollout.group == group]
        means.append(sum(total for _, total in members) / sum(tokens for tokens, _ in members))
    return sum(means) / len(means)


# --- the comparison


def inputs_of(case: Case, aggregation: str, with_reference: bool, with_proximal: bool = False) -> TokenInputs:
    tokens = np.array([sum(len(s) for s in rollout.sequences) for rollout in case.rollouts])
    groups = np.array([rollout.group for rollout in case.rollouts])
    same = groups[:, None] == groups
    members = Members(
        counted_N=tokens,
        texts_N=np.array([len(rollout.sequences) for rollout in case.rollouts]),
        group_sizes_N=same.sum(1),
        group_tokens_N=(same * tokens).sum(1),
    )
    weights = rollout_weights(aggregation, members)
    columns: list[tuple[float, float, int]] = []
    segment = 0
    for rollout, weight in zip(case.rollouts, weights, strict=True):
        for sequence in rollout.sequences:
            columns += [(rollout.advantage, float(weight), segment)] * len(sequence)
            segment += 1
    advantages, per_token, segments = zip(*columns, strict=True)
    return TokenInputs(
        sampler_logprobs_K=case.log_mu,
        advantages_K=torch.tensor(advantages, dtype=torch.float64),
        weights_K=torch.tensor(per_token, dtype=torch.float64),
        segments_K=torch.tensor(segments),
        num_segments=segment,
        ref_logprobs_K=case.log_ref if with_reference else None,
        proximal_logprobs_K=case.log_prox if with_proximal else None,
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_the_oracle(case: Case, head: OutputHead, name: str, extras: str) -> None:
    for aggregation, key in itertools.product(AGGREGATIONS, CORRECTIONS):
        if name in ("ppo", "gspo") and "tis" in key:
            continue  # refused: test_effective_weights
        chosen = {**CORRECTIONS[key], **EXTRAS[extras]}
        hidden = case.hidden.clone().requires_grad_()
        expected = oracle(case, head.weight, head.bias, hidden, name, aggregation, chosen)
        expected_gradients = torch.autograd.grad(expected, (hidden, head.weight, head.bias))

        settings = LossSettings(
            policy_loss=name.partition(" ")[0],
            proximal=name not in ("reinforce", "ppo", "gspo"),
            ratio_clamp=RATIO_CLAMP,
            epsilon_low=EPSILON_LOW,
            epsilon_high=EPSILON_HIGH,
            **chosen,
        )
        objective = PolicyObjective(inputs_of(case, aggregation, extras != "plain", "with" in name), settings)
        for chunk in (5, 10_000):
            output = head_loss(head, hidden, case.targets, objective, temperature=TEMPERATURE, chunk=chunk, fp32=True)
            gradients = torch.autograd.grad(output.loss, (hidden, head.weight, head.bias))
            where = f"{aggregation} {key} chunk={chunk}"
            assert relative_error(output.loss, expected) <= 1e-6, where
            for gradient, wanted in zip(gradients, expected_gradients, strict=True):
                assert relative_error(gradient, wanted) <= 1e-6, where


def test_kl_term_without_reference_is_no_silent_nothing(case: Case, head: OutputHead) -> None:
    objective = PolicyObjective(inputs_of(case, "token_mean", with_reference=False), LossSettings(kl_coef=0.1))
    with pytest.raises(AssertionError, match="reference"):
        head_loss(head, case.hidden, case.targets, objective, temperature=1.0, chunk=5, fp32=True)


def test_case_has_ratios_on_both_sides_of_every_bound(case: Case, head: OutputHead) -> None:
    """The comparison above would prove little about a bound that nothing crosses."""
    with torch.no_grad():
        log_pi = (head(case.hidden) / TEMPERATURE).log_softmax(-1).gather(1, case.targets[:, None])[:, 0]
    ratio = (log_pi - case.log_mu).exp()
    whole = torch.tensor([ratio[s].prod() for rollout in case.rollouts for s in rollout.sequences])
    for values, bound in (
        *((ratio, b) for b in (RATIO_CLAMP, 1 - EPSILON_LOW, 1 + EPSILON_HIGH, 1.2, 1.3, 0.55)),
        *((whole, b) for b in (1.5, 2.0)),
        ((case.log_ref - log_pi).abs(), 0.8),
    ):
        assert (values < bound).any(), bound
        assert (values > bound).any(), bound
