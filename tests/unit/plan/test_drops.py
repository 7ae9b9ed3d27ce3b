"""The model of what a bound on the lag drops, against drawn groups."""

import numpy as np
import pytest

from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.throughput import (
    QUEUED_STEPS,
    Workload,
    drop_shares,
    pipeline_plan,
    recommended_bound,
    steps_per_token,
)

WORK = Workload(
    devices=8,
    batch_size=256,
    lengths=Lengths.lognormal(600, 8192),
    train_time=4.92,
    utilisation=lambda h: -1.8 * np.expm1(-np.asarray(h) / 800.0),
)
PLAN = pipeline_plan(WORK, 4, 128)


@pytest.mark.parametrize("attempts", [1, 8, 64])
@pytest.mark.parametrize("bound", [4, 8, 16])
def test_drop_shares_equal_those_of_drawn_groups(attempts: int, bound: int) -> None:
    rng = np.random.default_rng(0)
    lengths = WORK.lengths.sample(rng, 64_000).reshape(-1, attempts)
    lags = np.ceil(lengths.max(1) * steps_per_token(WORK, PLAN)) + QUEUED_STEPS
    dropped = np.repeat(lags > bound, attempts)
    longest = np.argsort(lengths.ravel(), kind="stable")[-6400:]
    shares = drop_shares(WORK, PLAN, attempts, bound)
    assert shares.rollouts == pytest.approx(dropped.mean(), abs=0.03)
    assert shares.longest_tenth == pytest.approx(dropped[longest].mean(), abs=0.03)


def test_recommended_bound_drops_at_most_one_in_a_hundred_of_the_longest_tenth() -> None:
    bound = recommended_bound(WORK, PLAN, 8)
    assert drop_shares(WORK, PLAN, 8, bound).longest_tenth <= 0.01
    assert drop_shares(WORK, PLAN, 8, bound - 1).longest_tenth > 0.01


def test_constant_lengths_are_all_kept_or_all_dropped() -> None:
    """100 tokens at 64·1/(100·16) steps each are 4 steps, and 2 of queue."""
    work = Workload(
        devices=2, batch_size=16, lengths=Lengths.constant(100), train_time=1.0, utilisation=WORK.utilisation
    )
    plan = pipeline_plan(work, 1, 64)
    assert [drop_shares(work, plan, 8, bound).rollouts for bound in (5, 6)] == [1.0, 0.0]
    assert recommended_bound(work, plan, 8) == 6
