"""Probe attestation: after an update a server scores fixed tokens, and the trainer compares with its own values.

Bytes that arrived are not yet weights that are used (a stale tied head, a LoRA that is not attached, scrambled
shards), so the proof is the model's output. Pure; the sender asks the question.
"""

from dataclasses import dataclass

import numpy as np

PROBE_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What a server must answer for one version."""

    token_ids: tuple[int, ...]
    logprobs: np.ndarray
    """float32 [T]: the trainer's log p(token t | tokens 0 … t−1) at temperature 1; entry 0 is ignored."""
    tolerance: float
    """Largest allowed difference in nats."""

    def difference(self, answer: np.ndarray) -> float:
        """Largest |server − trainer| over the scored tokens; infinite if anything is missing or not a number."""
        if answer.shape != self.logprobs.shape:
            return float("inf")
        difference = np.abs(answer[1:].astype(np.float64) - self.logprobs[1:].astype(np.float64))
        return float(np.max(difference, initial=0.0)) if np.isfinite(difference).all() else float("inf")

    def accepts(self, answer: np.ndarray) -> bool:
        return self.difference(answer) <= self.tolerance


def probe_tokens(vocab_size: int, seed: int = 0, length: int = PROBE_TOKENS) -> tuple[int, ...]:
    """The run's fixed probe: tokens drawn over the whole vocabulary, so that no part of it goes unseen for long."""
    generator = np.random.default_rng(seed)
    return tuple(int(token) for token in generator.integers(0, vocab_size, size=length))
