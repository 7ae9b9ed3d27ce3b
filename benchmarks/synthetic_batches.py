"""Made-up training data with all that real data has: prompts, several spans and versions, references, unequal weights.

For tests and benchmarks of the trainer; the same samples can be packed in any way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.records import MicroBatch


@dataclass(frozen=True, kw_only=True)
class SyntheticSample:
    """One training sequence of T tokens."""

    token_ids: np.ndarray
    """int32 [T]"""
    spans: np.ndarray
    """int32 [R, 3], in positions of the sequence."""
    logprobs: np.ndarray
    """float32 [T]"""
    advantages: np.ndarray
    ref_logprobs: np.ndarray
    weight: float
    reward: float
    name: str


def make_samples(
    seed: int,
    count: int,
    *,
    vocab_size: int,
    lengths: tuple[int, int],
    step: int = 0,
    max_lag: int = 0,
    trained: float = 0.6,
) -> list[SyntheticSample]:
    """``count`` sequences of ``lengths`` (inclusive) tokens, the last ``trained`` part of each in one or two spans."""
    rng = np.random.default_rng((seed, step))
    samples = []
    for number in range(count):
        total = int(rng.integers(lengths[0], lengths[1] + 1))
        first = max(1, int(total * (1 - trained)))
        newest, oldest = step, max(step - max_lag, 0)
        if total - first >= 4:
            gap = int(rng.integers(first + 1, total - 2))
            versions = sorted(int(v) for v in rng.integers(oldest, newest + 1, 2))
            spans = [(first, gap, versions[0]), (gap + 1, total, versions[1])]
        else:
            spans = [(first, total, int(rng.integers(oldest, newest + 1)))]
        reward = float(rng.choice([-1.0, 0.0, 1.0]))
        mask = np.zeros(total, dtype=bool)
        for start, end, _ in spans:
            mask[start:end] = True
        samples.append(
            SyntheticSample(
                token_ids=rng.integers(0, vocab_size, total).astype(np.int32),
                spans=np.array(spans, dtype=np.int32),
                logprobs=np.where(mask, -np.log(vocab_size) + rng.normal(0, 0.3, total), 0).astype(np.float32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                ref_logprobs=np.where(mask, -np.log(vocab_size) + rng.normal(0, 0.5, total), 0).astype(np.float32),
                weight=float(rng.uniform(0.5, 1.5) / count),
                reward=reward,
                name=f"{step}-{number}/0/0",
            )
        )
    return samples


def pack(
    samples: Sequence[SyntheticSample],
    bins: Sequence[Sequence[int]],
    step: int = 0,
    *,
    rank_of: Sequence[int] | None = None,
    ref: bool = True,
) -> list[MicroBatch]:
    """One micro-batch per bin of sample numbers, in order.

    Args:
        rank_of: rank of each bin; ``index`` and ``count`` are then those within the rank. None = one rank.
    """
    ranks = list(rank_of) if rank_of is not None else [0] * len(bins)
    tokens = sum(int((s.spans[:, 1] - s.spans[:, 0]).sum()) for s in samples)
    records = []
    for number, members in enumerate(bins):
        chosen = [samples[i] for i in members]
        lengths = np.array([len(s.token_ids) for s in chosen], dtype=np.int32)
        starts = np.cumsum(lengths) - lengths
        spans = [s.spans + np.array([start, start, 0], dtype=np.int32) for s, start in zip(chosen, starts, strict=True)]
        records.append(
            MicroBatch(
                step=step,
                index=ranks[:number].count(ranks[number]),
                count=ranks.count(ranks[number]),
                token_ids=np.concatenate([s.token_ids for s in chosen]),
                segment_lengths=lengths,
                segment_weights=np.array([s.weight for s in chosen], dtype=np.float32),
                spans=np.concatenate(spans),
                logprobs=np.concatenate([s.logprobs for s in chosen]),
                advantages=np.concatenate([s.advantages for s in chosen]),
                ref_logprobs=np.concatenate([s.ref_logprobs for s in chosen]) if ref else None,
                num_samples=len(samples),
                num_tokens=tokens,
                sequence_ids=tuple(s.name for s in chosen),
                rewards=np.array([s.reward for s in chosen], dtype=np.float32),
                next_source=(0, 0),
            )
        )
    return records


def split_evenly(count: int, parts: int) -> list[list[int]]:
    """0 … count − 1 dealt to ``parts`` bins in turn."""
    return [list(range(first, count, parts)) for first in range(parts)]
