"""Made-up groups for tests and benchmarks, with all that real ones have: prompts, completions, turns, spans."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipelinerl.records import Rollout, RolloutGroup, TrainingSequence


def completion_lengths(rng: np.random.Generator, count: int, lengths: tuple[int, int] = (200, 8000)) -> np.ndarray:
    """int64 [count]: log-normal (median 1,500, σ 0.8), clipped to ``lengths``."""
    return np.clip(rng.lognormal(np.log(1500), 0.8, count), *lengths).astype(np.int64)


def make_sequence(
    rng: np.random.Generator, prompt: int, completions: list[int], *, vocab_size: int = 32_000, versions: int = 2
) -> TrainingSequence:
    """A prompt and completions with 20 tokens of answer between them; each completion crosses ``versions`` versions."""
    spans, position = [], prompt
    for completion in completions:
        cuts = np.linspace(0, completion, min(versions, completion) + 1).astype(int)
        spans += [(position + a, position + b, v) for v, (a, b) in enumerate(itertools.pairwise(cuts))]
        position += completion + 20
    total = position - 20
    return TrainingSequence(
        token_ids=rng.integers(0, vocab_size, total, dtype=np.int32),
        logprobs=-rng.random(sum(completions), dtype=np.float32),
        spans=np.array(spans, dtype=np.int32),
        finish_reason="stop",
    )


def make_groups(
    seed: int,
    count: int,
    *,
    attempts: int = 16,
    turns: int = 1,
    merged: bool = False,
    vocab_size: int = 32_000,
    versions: int = 2,
) -> Iterator[RolloutGroup]:
    """Groups of rollouts with prompts of 100–500 and completions of 200–8,000 tokens.

    Args:
        turns: LLM calls per rollout.
        merged: one sequence per rollout that holds all turns (together as long as one completion); else one per turn.
        versions: weight versions that each completion crosses, from 0 on.
    """
    rng = np.random.default_rng(seed)
    for position in range(count):
        prompt = int(rng.integers(100, 501))
        yield group_of(
            position,
            tuple(_make_rollout(rng, a, prompt, turns, merged, vocab_size, versions) for a in range(attempts)),
        )


def group_of(position: int, rollouts: Sequence[Rollout], domain: str = "synthetic", **fields: Any) -> RolloutGroup:
    """Return the group of all attempts at the problem at ``position`` of the first epoch; ``fields`` are the others."""
    return RolloutGroup(
        group_id=f"0-{position}",
        epoch=0,
        position=position,
        problem_index=position,
        dispatch_index=position,
        actor=0,
        domain=domain,
        dataset="train",
        attempts=len(rollouts),
        rollouts=tuple(rollouts),
        **{"dispatched_version": 0, "settled_before": 0, **fields},
    )


def _make_rollout(
    rng: np.random.Generator, attempt: int, prompt: int, turns: int, merged: bool, vocab_size: int, versions: int
) -> Rollout:
    if merged:
        total = int(completion_lengths(rng, 1)[0])
        completions = [[max(1, total // turns)] * turns]
    else:
        completions = [[length] for length in completion_lengths(rng, turns).tolist()]
    return Rollout(
        attempt=attempt,
        reward=float(rng.integers(0, 2)),
        sequences=tuple(
            make_sequence(rng, prompt, lengths, vocab_size=vocab_size, versions=versions) for lengths in completions
        ),
        metrics={},
        latency_s=1.0,
        num_llm_calls=turns,
    )
