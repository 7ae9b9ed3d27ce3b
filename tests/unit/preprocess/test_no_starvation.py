"""The pacing rule, the lag bound, filters and back-pressure together against a simulated trainer: it always gets there.

A discrete simulation of actor, preprocessor and trainer with the real `Pacing`, `BatchCutter` and `Totals`: one random
actor of the three moves at a time, groups finish out of order, weights arrive late.
"""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.actor.pacing import Pacing
from pipelinerl.preprocess.batching import BatchCutter, OptimizerBatch
from pipelinerl.preprocess.samples import Sample
from pipelinerl.preprocess.totals import Totals, next_own_step
from pipelinerl.records import DataOrder
from pipelinerl.records.drops import DropReason

STEPS = 12
MAX_EVENTS = 60_000


@dataclass
class Replica:
    """One actor with its preprocessor."""

    pacing: Pacing
    cutter: BatchCutter
    totals: Totals = field(default_factory=Totals)
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    """(dispatch number, version at dispatch)"""
    topic: list[Sample] = field(default_factory=list)
    read: int = 0
    dispatched: int = 0
    failed: int = 0
    units: int = 0
    groups: int = 0
    blocked: OptimizerBatch | None = None


@dataclass
class World:
    """Three roles and what they know of each other."""

    rng: random.Random
    batch_size: int
    attempts: int
    bound: int | None
    max_ready_steps: int
    filtered: float
    failures: float
    replicas: list[Replica]
    most_texts: int = 1
    published: dict[int, OptimizerBatch] = field(default_factory=dict)
    trained: list[OptimizerBatch] = field(default_factory=list)
    live_version: int = 0

    def dispatch(self, replica: Replica) -> None:
        mean = replica.units / len(replica.topic) if replica.topic else 1.0
        units = replica.units + len(replica.in_flight) * self.attempts * mean
        if self.most_texts > 1 and not replica.topic and units >= self.batch_size:
            return
        if replica.pacing.may_start(dispatched=units, dropped=replica.totals.room, version=self.live_version):
            replica.dispatched += self.attempts
            replica.in_flight.append((replica.groups, self.live_version))
            replica.groups += 1

    def finish(self, replica: Replica) -> None:
        """Any group under way ends; its tokens are of versions between dispatch and now."""
        if not replica.in_flight:
            return
        number, version = replica.in_flight.pop(self.rng.randrange(len(replica.in_flight)))
        if self.rng.random() < self.failures:
            replica.failed += self.attempts
            return
        reason = DropReason.ZERO_ADVANTAGE if self.rng.random() < self.filtered else None
        offset = len(replica.topic) // self.attempts
        sizes = [self.rng.randint(1, self.most_texts) for _ in range(self.attempts)]
        replica.units += sum(sizes)
        replica.topic += [
            Sample(
                sample_id=f"{number}/{attempt}",
                group_id=str(number),
                domain="d",
                source=(offset, attempt),
                reward=0.0,
                oldest_version=version,
                newest_version=self.live_version,
                size=size,
                drop_reason=reason,
            )
            for attempt, size in enumerate(sizes)
        ]

    def preprocess(self, replica: Replica) -> None:
        if replica.blocked is None and replica.read < len(replica.topic):
            sample = replica.topic[replica.read]
            replica.read += 1
            replica.totals.decided(sample, replica.cutter.offer(sample))
            replica.blocked = replica.cutter.next_batch()
        batch = replica.blocked
        if batch is not None and batch.step - len(self.trained) <= self.max_ready_steps:
            self.published[batch.step] = batch
            replica.totals.published(batch, DataOrder())
            replica.blocked = None

    def train(self) -> None:
        if len(self.trained) in self.published:
            self.trained.append(self.published.pop(len(self.trained)))

    def push(self) -> None:
        """The trainer trains at most one step beyond the version it has begun to push."""
        self.live_version = self.rng.randint(self.live_version, len(self.trained))

    def run(self) -> None:
        events = [self.dispatch, self.finish, self.preprocess]
        for _ in range(MAX_EVENTS):
            if len(self.trained) == STEPS:
                return
            if self.rng.random() < 0.2:
                self.rng.choice([self.train, self.push])()
            else:
                self.rng.choice(events)(self.rng.choice(self.replicas))
        raise AssertionError(f"starved after {len(self.trained)} of {STEPS} steps")


@given(
    seed=st.integers(0, 100_000),
    batch_size=st.integers(1, 24),
    attempts=st.integers(1, 8),
    bound=st.sampled_from([None, 0, 1, 2, 8]),
    max_ready_steps=st.integers(1, 4),
    filtered=st.sampled_from([0.0, 0.5, 0.9]),
    failures=st.sampled_from([0.0, 0.3]),
    num_replicas=st.integers(1, 3),
    most_texts=st.sampled_from([1, 5, 30]),
    drops=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_bounds_filters_and_delays_train_every_step_within_the_lag_bound(
    seed, batch_size, attempts, bound, max_ready_steps, filtered, failures, num_replicas, most_texts, drops
):
    """The lag of every token, if older ones are dropped; else the mean, with a last group of every actor beside it."""
    replicas = [
        Replica(
            pacing=Pacing(
                batch_size=batch_size,
                max_lag_steps=bound,
                max_train_steps=STEPS,
                actor=replica,
                num_actors=num_replicas,
            ),
            cutter=BatchCutter(
                step=next_own_step(0, replica, num_replicas),
                batch_size=batch_size,
                max_lag_steps=bound if drops else None,
                stride=num_replicas,
            ),
        )
        for replica in range(num_replicas)
    ]
    world = World(random.Random(seed), batch_size, attempts, bound, max_ready_steps, filtered, failures, replicas)
    world.most_texts = most_texts
    world.run()
    for step, batch in enumerate(world.trained):
        assert batch.step == step
        sizes = [sample.size for sample in batch.samples]
        assert sum(sizes) - sizes[-1] < batch_size <= sum(sizes)
        assert batch.excess == sum(sizes) - batch_size
        for sample in batch.samples:
            assert sample.newest_version <= step
            assert bound is None or not drops or step - sample.oldest_version <= bound
    if bound is not None and most_texts == 1:
        lag = sum(step - sample.oldest_version for step, batch in enumerate(world.trained) for sample in batch.samples)
        assert lag <= (STEPS - 1) * (bound * batch_size + num_replicas * (attempts - 1))
