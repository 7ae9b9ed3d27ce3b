"""Chooses the next problem: a seeded permutation per epoch holds each problem once, split over the actors. Pure.

Actor ``i`` of ``n`` takes the places ``i``, ``i + n``, … of an epoch, whose order depends only on (seed, domain, epoch)
and on the problems that had left the pool when it began. With a sampler an epoch is a round of the problems it drew.
"""

import zlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from pipelinerl.actor.sampling import ProblemSampler
from pipelinerl.errors import DomainError
from pipelinerl.records.order import DomainOrder, numbers


@dataclass(frozen=True, kw_only=True, order=True)
class Place:
    epoch: int
    position: int
    """Position in the epoch's permutation over all actors."""
    problem_index: int


def epoch_places(
    *, num_problems: int, seed: int, name: str, epoch: int, actor: int, num_actors: int, removed: Collection[int] = ()
) -> list[Place]:
    """Returns the places of one actor in one epoch, in order. ``removed``: indices of problems that left the pool."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), epoch])
    order = rng.permutation(num_problems)
    gone = set(removed)
    return [
        Place(epoch=epoch, position=position, problem_index=int(order[position]))
        for position in range(actor, num_problems, num_actors)
        if int(order[position]) not in gone
    ]


class EpochProgress(msgspec.Struct, frozen=True, kw_only=True):
    """The resolved positions of one epoch (for restarts)."""

    epoch: int
    removed_when_begun: tuple[int, ...] = msgspec.field(name="removed")
    """Problems that had left the pool when the epoch began."""
    resolved: tuple[int, ...] = msgspec.field(name="settled")
    """Positions of this epoch that are published or dropped."""
    drawn: tuple[int, ...] = ()
    """Indices of the problems of this actor's places, in order, if a sampler drew them. Empty: the permutation's."""


@dataclass(eq=False)
class _Epoch:
    """An epoch that has begun and is not completely resolved."""

    removed_when_begun: tuple[int, ...]
    drawn: tuple[int, ...]
    size: int
    resolved: set[int] = field(default_factory=set)


class ProblemSource:
    """Yields one domain's problems for one actor without end.

    Args:
        sampler: draws the problems. None: every epoch holds each problem once.

    Example:
        >>> source = ProblemSource(num_problems=3, seed=0, name="guessing")
        >>> sorted(source.next_problem().problem_index for _ in range(3))
        [0, 1, 2]
    """

    def __init__(
        self,
        *,
        num_problems: int,
        seed: int,
        name: str,
        actor: int = 0,
        num_actors: int = 1,
        sampler: ProblemSampler | None = None,
    ):
        if num_problems < num_actors:
            raise DomainError(
                f"domain {name} has {num_problems} training problems for world.replicas={num_actors} actors: "
                "every actor needs at least one"
            )
        self._num_problems, self._seed, self._name = num_problems, seed, name
        self._actor, self._num_actors = actor, num_actors
        self.sampler = sampler
        self._removed: set[int] = set()
        self._epochs: dict[int, _Epoch] = {}
        self._queue: deque[Place] = deque()
        self._next_epoch = 0

    def next_problem(self) -> Place:
        """Returns the place of the next problem that is not resolved."""
        while True:
            while not self._queue:
                self._begin_epoch(self._next_epoch, tuple(sorted(self._removed)))
            place = self._queue.popleft()
            epoch = self._epochs.get(place.epoch)
            if epoch is not None and place.position not in epoch.resolved:
                return place

    def size_of(self, epoch: int) -> int:
        """Returns this actor's number of problems in an epoch that has begun and is not completely resolved."""
        return self._epochs[epoch].size

    def mark_resolved(self, place: Place) -> None:
        """Marks a place as resolved, because its group was published or dropped."""
        epoch = self._epochs.get(place.epoch)
        if epoch is None:
            return
        epoch.resolved.add(place.position)
        if len(epoch.resolved) == epoch.size:
            del self._epochs[place.epoch]

    def remove(self, problem_index: int) -> None:
        """Removes the problem from the pool from the next epoch on."""
        self._removed.add(problem_index)

    @property
    def removed(self) -> frozenset[int]:
        return frozenset(self._removed)

    @property
    def epoch(self) -> int:
        """The newest epoch that ``next_problem`` has reached."""
        return max(0, self._next_epoch - 1)

    @property
    def next_epoch(self) -> int:
        """The epoch that begins once all places of the current epochs have been taken."""
        return self._next_epoch

    def progress(self) -> tuple[EpochProgress, ...]:
        """Returns the epochs that are not completely resolved. All other epochs before ``next_epoch`` are."""
        return tuple(
            EpochProgress(
                epoch=number,
                removed_when_begun=epoch.removed_when_begun,
                resolved=tuple(sorted(epoch.resolved)),
                drawn=epoch.drawn,
            )
            for number, epoch in sorted(self._epochs.items())
        )

    def restore(self, *, next_epoch: int, progress: Iterable[EpochProgress], removed: Iterable[int]) -> None:
        """Continues where an earlier process stopped. Places of its epochs that are not resolved come first."""
        self._removed = set(removed)
        self._queue.clear()
        self._epochs.clear()
        for begun in sorted(progress, key=lambda item: item.epoch):
            is_there = all(index < self._num_problems for index in begun.drawn)  # else the data set has shrunk
            self._begin_epoch(begun.epoch, begun.removed_when_begun, begun.drawn if is_there else ())
            self._epochs[begun.epoch].resolved.update(begun.resolved)
        self._next_epoch = next_epoch

    def resume_from_checkpoint(
        self, order: DomainOrder, removed: Iterable[int], removed_at: Mapping[int, Iterable[int]]
    ) -> None:
        """Continues after a checkpoint. Places that it has not resolved come again, with a sampler as new draws.

        Args:
            order: what the checkpoint has resolved of this domain.
            removed: problems that have left the pool.
            removed_at: epoch → problems that had left the pool when it began, where that is known.
        """
        done = numbers(order.done)
        begun = max([*done, *order.epochs], default=-1) + 1
        resolved = {
            epoch: numbers(order.epochs[epoch].settled) if epoch in order.epochs else set() for epoch in range(begun)
        }
        progress = [
            EpochProgress(
                epoch=epoch,
                removed_when_begun=tuple(removed_at.get(epoch, ())),
                resolved=tuple(sorted(self._actor + turn * self._num_actors for turn in turns)),
                drawn=self._draw(epoch, removed, order.epochs[epoch].size if epoch in order.epochs else 0),
            )
            for epoch, turns in resolved.items()
            if epoch not in done
        ]
        self.restore(next_epoch=begun, progress=progress, removed=removed)

    def _begin_epoch(self, epoch: int, removed: tuple[int, ...], drawn: tuple[int, ...] = ()) -> None:
        drawn = drawn or self._draw(epoch, removed)
        places = self._places(epoch, removed, drawn)
        if not places:  # every problem of this actor left the pool: use all of them again
            removed = ()
            self._removed.clear()
            drawn = self._draw(epoch, ())
            places = self._places(epoch, (), drawn)
        self._epochs[epoch] = _Epoch(removed_when_begun=removed, drawn=drawn, size=len(places))
        self._queue.extend(places)
        self._next_epoch = epoch + 1

    def _draw(self, epoch: int, removed: Iterable[int], size: int = 0) -> tuple[int, ...]:
        return self.sampler.draw(epoch, removed=set(removed), size=size) if self.sampler is not None else ()

    def _places(self, epoch: int, removed: Collection[int], drawn: Sequence[int]) -> list[Place]:
        if self.sampler is not None:
            return [
                Place(epoch=epoch, position=self._actor + turn * self._num_actors, problem_index=index)
                for turn, index in enumerate(drawn)
            ]
        return epoch_places(
            num_problems=self._num_problems,
            seed=self._seed,
            name=self._name,
            epoch=epoch,
            actor=self._actor,
            num_actors=self._num_actors,
            removed=removed,
        )
