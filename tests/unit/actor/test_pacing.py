"""The pacing rule against a simulated preprocessor and trainer: no deadlock, no lag beyond the bound, no starvation."""

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.actor.pacing import Pacing

STEPS = 10
MAX_TICKS = 200_000


@dataclass
class World:
    """Actor, preprocessor and trainer as counters; ``tick`` lets one of them, chosen at random, do one thing.

    A group takes a random number of ticks, may lose all its rollouts, and every published rollout may be filtered.
    The preprocessor packs in publication order and drops what would exceed ``bound`` when it is trained.
    """

    pacing: Pacing
    attempts: int
    slots: int
    bound: int | None
    fail: float
    keep: float
    push_every: int
    rng: random.Random
    version: int = 0
    step: int = 0
    dispatched: int = 0
    dropped: int = 0
    dropped_later: int = 0
    seen_dropped_later: int = 0
    running: list[int] = field(default_factory=list)
    published: deque[tuple[int, int]] = field(default_factory=deque)
    """(version at the start, version at the end) of each rollout"""
    batch: list[tuple[int, int]] = field(default_factory=list)
    ready: deque[list[tuple[int, int]]] = field(default_factory=deque)
    packed: int = 0
    trained_lags: list[int] = field(default_factory=list)
    trained_waits: list[int] = field(default_factory=list)
    """Steps from the end of each trained rollout's group to its training."""

    def tick(self) -> None:
        random_order = [self.start, self.finish, self.pack, self.train, self.hear]
        self.rng.choice(random_order)()

    def start(self) -> None:
        dropped = self.dropped + self.seen_dropped_later
        if len(self.running) < self.slots and self.pacing.may_start(
            dispatched=self.dispatched, dropped=dropped, version=self.version
        ):
            self.dispatched += self.attempts
            self.running.append(self.version)

    def finish(self) -> None:
        if not self.running or self.rng.random() < 0.3:
            return
        version = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < self.fail:
            self.dropped += self.attempts
        else:
            self.published.extend([(version, self.version)] * self.attempts)

    def pack(self) -> None:
        if not self.published:
            return
        versions = self.published.popleft()
        filtered = self.rng.random() > self.keep
        if filtered or (self.bound is not None and self.packed - versions[0] > self.bound):
            self.dropped_later += 1
            return
        self.batch.append(versions)
        if len(self.batch) == self.pacing.batch_size:
            self.ready.append(self.batch)
            self.batch, self.packed = [], self.packed + 1

    def train(self) -> None:
        if self.ready and self.step < STEPS:
            batch = self.ready.popleft()
            self.trained_lags += [self.step - started for started, _ in batch]
            self.trained_waits += [self.step - ended for _, ended in batch]
            self.step += 1
            if self.step % self.push_every == 0:
                self.version = self.step

    def hear(self) -> None:
        self.seen_dropped_later = self.dropped_later


def simulate(world: World) -> World:
    for _ in range(MAX_TICKS):
        if world.step == STEPS:
            return world
        world.tick()
    raise AssertionError(f"no progress after {MAX_TICKS} ticks: {world}")


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bound=st.sampled_from([0, 1, 2, 8, None]),
    batch=st.integers(1, 12),
    attempts=st.integers(1, 8),
    slots=st.integers(1, 12),
    fail=st.sampled_from([0.0, 0.2, 0.8]),
    keep=st.sampled_from([1.0, 0.5, 0.1]),
)
def test_pipeline_never_deadlocks_nor_exceeds_the_bound(
    seed: int, bound: int | None, batch: int, attempts: int, slots: int, fail: float, keep: float
) -> None:
    pacing = Pacing(batch_size=batch, max_lag_steps=bound, max_train_steps=STEPS)
    world = simulate(World(pacing, attempts, slots, bound, fail, keep, 1, random.Random(seed)))
    assert len(world.trained_lags) == STEPS * batch
    assert min(world.trained_lags) >= 0
    assert bound is None or max(world.trained_lags) <= bound
    assert bound != 0 or set(world.trained_lags) == {0}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    bound=st.sampled_from([0, 1, 2, 8]),
    batch=st.integers(1, 12),
    attempts=st.integers(1, 8),
    slots=st.integers(1, 12),
    fail=st.sampled_from([0.0, 0.2]),
    keep=st.sampled_from([1.0, 0.5]),
)
def test_without_drops_the_bound_holds_in_the_mean_and_behind_the_end_of_a_group(
    seed: int, bound: int, batch: int, attempts: int, slots: int, fail: float, keep: float
) -> None:
    """When a version comes, at most bound · batch + attempts − 1 samples wait for training (docs/pacing.md)."""
    pacing = Pacing(batch_size=batch, max_lag_steps=bound, max_train_steps=STEPS)
    world = simulate(World(pacing, attempts, slots, None, fail, keep, 1, random.Random(seed)))
    assert len(world.trained_lags) == STEPS * batch
    assert sum(world.trained_lags) <= (STEPS - 1) * (bound * batch + attempts - 1)
    assert max(world.trained_waits) <= bound + math.ceil((attempts - 1) / batch)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    phase=st.sampled_from([1, 2, 3, 4]),
    batch=st.integers(1, 8),
    attempts=st.integers(1, 6),
    keep=st.sampled_from([1.0, 0.3]),
)
def test_conventional_generates_each_phase_on_one_version(
    seed: int, phase: int, batch: int, attempts: int, keep: float
) -> None:
    pacing = Pacing(
        batch_size=batch,
        max_lag_steps=None,
        max_train_steps=STEPS,
        schedule="conventional",
        steps_per_phase=phase,
    )
    bound = phase - 1
    world = simulate(World(pacing, attempts, 8, bound, 0.1, keep, phase, random.Random(seed)))
    assert len(world.trained_lags) == STEPS * batch
    assert max(world.trained_lags) <= bound


def test_bound_zero_admits_exactly_one_batch_per_version() -> None:
    pacing = Pacing(batch_size=64, max_lag_steps=0, max_train_steps=100)
    assert pacing.may_start(dispatched=63, dropped=0, version=0)
    assert not pacing.may_start(dispatched=64, dropped=0, version=0)
    assert pacing.may_start(dispatched=64, dropped=0, version=1)


def test_a_drop_makes_room_at_once() -> None:
    pacing = Pacing(batch_size=8, max_lag_steps=2, max_train_steps=100)
    assert not pacing.may_start(dispatched=24, dropped=0, version=0)
    assert pacing.may_start(dispatched=24, dropped=1, version=0)


def test_holds_only_what_a_newer_version_would_let_start() -> None:
    """At version 1 the steps 1 to 3 may be under way: 32 samples. The run needs 100 of 8."""
    pacing = Pacing(batch_size=8, max_lag_steps=2, max_train_steps=100)
    assert not pacing.holds(dispatched=31, dropped=0, version=1)
    assert pacing.holds(dispatched=32, dropped=0, version=1)
    assert not pacing.holds(dispatched=32, dropped=1, version=1)
    assert not pacing.holds(dispatched=800, dropped=0, version=97), "all that the run needs are dispatched"
    unbounded = Pacing(batch_size=8, max_lag_steps=None, max_train_steps=3)
    assert not unbounded.holds(dispatched=24, dropped=0, version=0)


def test_nothing_is_generated_beyond_the_last_step() -> None:
    pacing = Pacing(batch_size=8, max_lag_steps=None, max_train_steps=3)
    assert (pacing.may_start(dispatched=23, dropped=0, version=0), pacing.limit(0)) == (True, 24)
    assert not pacing.may_start(dispatched=24, dropped=0, version=2)


def test_conventional_waits_for_a_whole_phase() -> None:
    pacing = Pacing(batch_size=10, max_lag_steps=None, max_train_steps=100, schedule="conventional", steps_per_phase=4)
    assert [pacing.limit(version) for version in (0, 1, 3, 4, 7, 8)] == [40, 40, 40, 80, 80, 120]


@pytest.mark.parametrize("actors", [1, 2, 3, 5])
def test_actors_share_the_steps_in_turn(actors: int) -> None:
    shares = [
        Pacing(batch_size=7, max_lag_steps=1, max_train_steps=50, actor=i, num_actors=actors).limit(3)
        for i in range(actors)
    ]
    assert sum(shares) == (3 + 1 + 1) * 7
    assert shares == {1: [35], 2: [21, 14], 3: [14, 14, 7], 5: [7, 7, 7, 7, 7]}[actors]
