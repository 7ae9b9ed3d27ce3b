"""Records that the stream tests write."""

from collections.abc import Callable

import numpy as np
import pytest

from pipelinerl.records import MicroBatch, Rollout, RolloutGroup, TrainingSequence


@pytest.fixture
def make_group() -> Callable[..., RolloutGroup]:
    return _group


@pytest.fixture
def make_micro_batch() -> Callable[..., MicroBatch]:
    return _micro_batch


def _group(*, attempts: int = 2, num_tokens: int = 6, prompt_tokens: int = 2, seed: int = 0) -> RolloutGroup:
    rng = np.random.default_rng(seed)

    def rollout(attempt: int) -> Rollout:
        sequence = TrainingSequence(
            token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
            logprobs=-rng.random(num_tokens - prompt_tokens, dtype=np.float32),
            spans=np.array([[prompt_tokens, num_tokens, 3]], np.int32),
            finish_reason="stop",
        )
        return Rollout(
            attempt=attempt,
            reward=float(attempt % 2),
            sequences=(sequence,),
            metrics={"success": float(attempt % 2)},
            latency_s=0.5,
            num_llm_calls=1,
        )

    return RolloutGroup(
        group_id=f"0-{seed}",
        epoch=0,
        position=seed,
        problem_index=seed,
        actor=0,
        domain="guessing",
        dataset="train",
        attempts=attempts,
        rollouts=tuple(rollout(attempt) for attempt in range(attempts)),
        dispatched_version=3,
        settled_before=seed,
        dispatch_index=seed,
    )


def _micro_batch(*, num_tokens: int = 8, num_segments: int = 2, seed: int = 0) -> MicroBatch:
    rng = np.random.default_rng(seed)
    length = num_tokens // num_segments
    starts = np.arange(num_segments, dtype=np.int32) * length
    return MicroBatch(
        step=4,
        index=0,
        count=1,
        token_ids=rng.integers(0, 50_000, num_tokens, dtype=np.int32),
        segment_lengths=np.full(num_segments, length, np.int32),
        segment_weights=np.ones(num_segments, np.float32),
        spans=np.stack([starts + 1, starts + length, np.full(num_segments, 3, np.int32)], axis=1),
        logprobs=-rng.random(num_tokens, dtype=np.float32),
        advantages=rng.standard_normal(num_tokens, dtype=np.float32),
        ref_logprobs=-rng.random(num_tokens, dtype=np.float32),
        num_samples=num_segments,
        num_tokens=num_tokens - num_segments,
        sequence_ids=tuple(f"0-{seed}/{segment}/0" for segment in range(num_segments)),
        rewards=np.zeros(num_segments, np.float32),
        next_source=(7, 0),
    )
