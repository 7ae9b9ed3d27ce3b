"""Filters and reward shaping (docs/algorithms.md §5). Pure functions of one rollout or one group."""

from collections.abc import Sequence

import numpy as np

from pipelinerl.records import Rollout, TrainingSequence

ZERO_TOLERANCE = 1e-6


def soft_overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's penalty (arXiv:2503.14476, eq. 13): 0 up to ``max_tokens − buffer_tokens``, then linear to −1.

    Args:
        num_tokens: |y|, tokens of the completion.
        max_tokens: L_max, at which the server ends a completion.
        buffer_tokens: L_buffer > 0.
    """
    return float(np.clip((max_tokens - num_tokens) / buffer_tokens - 1.0, -1.0, 0.0))


def longest_completion(sequences: Sequence[TrainingSequence]) -> int:
    """Tokens of the longest completion. A completion is a run of adjacent spans, which may differ in version."""
    return max((_longest_run(sequence.spans) for sequence in sequences), default=0)


def _longest_run(spans_R3: np.ndarray) -> int:
    if not len(spans_R3):
        return 0
    starts, ends = spans_R3[:, 0], spans_R3[:, 1]
    first = np.concatenate(([True], starts[1:] != ends[:-1]))
    return int((ends[np.append(first[1:], True)] - starts[first]).max())


def is_overlong(rollout: Rollout) -> bool:
    """Whether the server ended a completion of this rollout because it hit the length limit."""
    return any(sequence.finish_reason == "length" for sequence in rollout.sequences)


def all_advantages_zero(advantages: np.ndarray) -> bool:
    """Whether a group gives no gradient: |A| ≤ 1e-6 for every member."""
    return bool((np.abs(advantages) <= ZERO_TOLERANCE).all())
