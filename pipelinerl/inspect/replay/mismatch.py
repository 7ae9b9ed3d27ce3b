"""Splits the gap between trainer and sampler into its causes, by comparing log-probabilities computed again. Pure.

For every trained token there are three: μ of the server, π of the weights that trained it, and π_v of the weights that
sampled it, which a replay computes on its way.

    log π − log μ = (log π − log π_v) + (log π_v − log μ)

The first part is staleness. The second is numerics on sequences of one version. Behind an update, what exceeds the
numerics comes from keys and values of older weights. If it has one sign, the server samples from fewer tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.inspect.replay.folder import ReplayedSequence

ONE_SIGN = 0.95
LEAST_TRUNCATION = 1e-3
"""Truncation: at least this share of tokens with one sign, and a mean of at least this many nats."""
FIXES = {
    "staleness": "Lower max_lag_steps or finetune.learning_rate, or set finetune.rl.proximal_every or token_tis",
    "kept KV cache": "Take shorter sequences or fewer updates in flight (finetune.weight_update_interval), and "
    "vllm_config.prefix_caching=version",
    "truncation": "Take top_p, top_k, min_p and penalties out of llm.parameters: the trainer knows the whole "
    "distribution only",
    "precision": "Use one dtype at both ends and fp32_lm_head, or set finetune.rl.proximal_every, so that the ratio is "
    "taken to the trainer's own policy",
    "routing": "Experts are chosen differently at both ends: use one dtype for the router, or set "
    "finetune.rl.proximal_every and a mask (token_mis)",
}


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Mean size of the gap and of its parts, in nats per token."""

    gap: float
    """Mean of |log π − log μ| over the known tokens."""
    parts: dict[str, float]
    """By cause. Each is a mean over the known tokens. Sizes of parts need not add up to the gap's."""
    known: int
    """Tokens whose sampling weights the replay passed through."""
    unknown: int
    """Tokens that older weights than those of the replay's checkpoint sampled."""
    mixed: int
    """Known tokens behind an update in their sequence."""

    @property
    def largest(self) -> str | None:
        """The cause with the largest part. None if nothing is known, or all parts are 0."""
        found = [cause for cause, nats in self.parts.items() if nats]
        return max(found, key=lambda cause: self.parts[cause], default=None)

    @property
    def lines(self) -> list[str]:
        if not self.known:
            return [
                "the gap cannot be split: the replay's checkpoint is newer than the weights that sampled the tokens"
            ]
        parts = [f"  {cause:<12} {nats:.3g} nats" for cause, nats in self.parts.items()]
        left_out = f", {self.unknown} older ones left out" if self.unknown else ""
        return [
            f"trainer and server differ by {self.gap:.3g} nats on average over {self.known} tokens{left_out}",
            *parts,
            "  they are equal"
            if self.largest is None
            else f"alarm: mismatch: the largest cause is {self.largest}. {FIXES[self.largest]}",
        ]


def attribute(sequences: Sequence[ReplayedSequence], *, has_experts: bool) -> Attribution:
    """Split the gap of a step's sequences, whose ``version_logprobs`` are NaN where unknown.

    Args:
        has_experts: the model is a mixture of experts, whose numerics are its routing before all.
    """
    columns = [_columns(sequence) for sequence in sequences]
    trainer, sampler, own, mixed = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    known = ~np.isnan(own)
    if not known.any():
        return Attribution(gap=0.0, parts={}, known=0, unknown=len(own), mixed=0)
    trainer, sampler, own, mixed = trainer[known], sampler[known], own[known], mixed[known]
    server = own - sampler
    clean = np.abs(server[~mixed]).mean() if (~mixed).any() else 0.0
    kept = max(float(np.abs(server[mixed]).mean() - clean), 0.0) * mixed.mean() if mixed.any() else 0.0
    names = ("truncation", "routing" if has_experts else "precision")
    numerics = names[0] if is_truncated(server[~mixed]) else names[1]
    parts = {"staleness": float(np.abs(trainer - own).mean()), "kept KV cache": float(kept), numerics: float(clean)}
    return Attribution(
        gap=float(np.abs(trainer - sampler).mean()),
        parts=parts,
        known=int(known.sum()),
        unknown=int((~known).sum()),
        mixed=int(mixed.sum()),
    )


def is_truncated(differences: np.ndarray) -> bool:
    """Whether log π_v − log μ has one sign, as probabilities that were renormalised over fewer tokens have it."""
    if not len(differences) or np.abs(differences).mean() < LEAST_TRUNCATION:
        return False
    return bool((differences < 0).mean() >= ONE_SIGN)


def _columns(sequence: ReplayedSequence) -> tuple[np.ndarray, ...]:
    """(trainer, sampler, own, mixed): float64 log-probabilities, and whether a token is behind an update."""
    mixed = sequence.versions != sequence.versions[0]
    values = (sequence.logprobs, sequence.sampler_logprobs, sequence.version_logprobs)
    return (*(value.astype(np.float64) for value in values), mixed)
