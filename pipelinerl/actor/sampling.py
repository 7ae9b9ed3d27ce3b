"""Draws a domain's problems in rounds, as the user's `actor.sampler` weighs what is known of them.

A problem's history is a fold over the actor's records, and a round depends only on it, the seed and the round's number.

Shapes: N training problems of the domain, without those that other actors take.
"""

import itertools
import logging
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Any

import numpy as np

from pipelinerl.config.sections import Config
from pipelinerl.domains.contract import check_call, describe_error, import_named
from pipelinerl.domains.datasets import Problem
from pipelinerl.errors import DomainError
from pipelinerl.records import GroupOutcome, ProblemHistory

log = logging.getLogger(__name__)

KEY = "actor.sampler"
SLOW_S = 1.0
"""Time of a call after which it is logged, even if it never returns."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A sampler's argument: N problems, and how the policy has done on each.

    Means are over the groups of a problem, and each newer group counts as much as all before it: m ← (m + newest) / 2.
    NaN: no group of it was published.
    """

    problems: Sequence[Problem]
    """As the loader returned them, N of them."""
    groups_N: np.ndarray
    """int64 [N]: groups that ended, published or dropped."""
    success_N: np.ndarray
    """float64 [N]: share of a group's attempts that succeeded, mean."""
    spread_N: np.ndarray
    """float64 [N]: mean of |reward − the group's mean reward|, the size of its advantages before any scaling, mean."""
    version_N: np.ndarray
    """int64 [N]: newest weight version that was live when a group of it began. −1: none."""
    version: int
    """The newest of all."""


Sampler = Callable[..., np.ndarray]
"""(pool, **actor.sampler_kwargs) → float [N] ≥ 0: how much more often than others each problem is to be drawn."""


class ProblemSampler:
    """One domain's history, and the rounds that are drawn by it.

    Args:
        problems: all training problems of the domain.
        size: problems of a round, at most those of this actor.
        seed, name: as for ``ProblemSource``.
        actor: this actor takes the problems ``actor``, ``actor + num_actors``, …, so that each has its whole history
            in one place.

    Example:
        >>> sampler = ProblemSampler([{}, {}, {}], lambda pool: [0, 1, 0], size=2, seed=0, name="guessing")
        >>> sampler.draw(0)
        (1, 1)
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        function: Sampler,
        kwargs: Mapping[str, Any] | None = None,
        *,
        size: int,
        seed: int,
        name: str,
        actor: int = 0,
        num_actors: int = 1,
    ):
        self._problems, self._indices = problems[actor::num_actors], range(actor, len(problems), num_actors)
        self._function, self._kwargs = function, dict(kwargs or {})
        self._size, self._seed, self._name, self._actor = size, seed, name, actor
        self.restore({})
        self._shares_N = np.full(len(self._problems), 1 / len(self._problems))

    def draw(self, number: int, *, removed: Collection[int] = (), size: int = 0) -> tuple[int, ...]:
        """Draws the problems of round ``number``, without replacement as long as problems with a weight are left.

        Args:
            removed: indices of problems that have left the pool. If all have, none is drawn.
            size: of the round. 0 = as usual.
        Raises:
            DomainError: the function raises, or returns anything but N finite weights ≥ 0.
        """
        kept_N = np.ones(len(self._indices), dtype=bool)
        kept_N[[self._indices.index(index) for index in removed if index in self._indices]] = False
        if not kept_N.any():
            return ()
        weights_N = self._weigh() * kept_N
        weights_N = weights_N / weights_N.max() if weights_N.any() else kept_N.astype(np.float64)
        self._shares_N = shares_N = weights_N / weights_N.sum()
        rng = np.random.default_rng([self._seed, zlib.crc32(self._name.encode()), number, self._actor])
        drawn: list[int] = []
        wanted = size or min(self._size, len(self._indices))
        while len(drawn) < wanted:
            count = min(wanted - len(drawn), int(np.count_nonzero(shares_N)))  # the tiniest weights round to no share
            chosen = rng.choice(len(shares_N), count, replace=False, p=shares_N)
            drawn += [self._indices[n] for n in chosen]
        return tuple(drawn)

    def observe(self, outcome: GroupOutcome) -> None:
        """Adds a group to its problem's history."""
        before = self._history.get(outcome.problem_index, ProblemHistory())
        self._note(outcome.problem_index, before.after(outcome))

    def history(self) -> dict[int, ProblemHistory]:
        """Returns what is known, by the index of the problem, for a snapshot."""
        return dict(self._history)

    def restore(self, history: Mapping[int, ProblemHistory]) -> None:
        """Replaces what is known. Problems of other actors are left out."""
        self._history: dict[int, ProblemHistory] = {}
        self._groups_N = np.zeros(len(self._indices), dtype=np.int64)
        self._success_N, self._spread_N = np.full((2, len(self._indices)), np.nan)
        self._version_N = np.full(len(self._indices), -1, dtype=np.int64)
        for index, problem in history.items():
            if index in self._indices:
                self._note(index, problem)

    def _note(self, index: int, problem: ProblemHistory) -> None:
        self._history[index], n = problem, self._indices.index(index)
        self._groups_N[n], self._version_N[n] = problem.groups, problem.version
        if problem.success is not None and problem.spread is not None:
            self._success_N[n], self._spread_N[n] = problem.success, problem.spread

    @property
    def problems_tried(self) -> int:
        """Problems with a group that has ended."""
        return len(self._history)

    @property
    def pool_size(self) -> float:
        """From how many problems the last round was drawn: (Σw)² / Σw² of its weights, N if all are alike."""
        return float(1 / np.square(self._shares_N).sum())

    def pool(self) -> Pool:
        """Returns the sampler's argument."""
        return Pool(
            problems=self._problems,
            groups_N=self._groups_N.copy(),
            success_N=self._success_N.copy(),
            spread_N=self._spread_N.copy(),
            version_N=self._version_N.copy(),
            version=max(0, int(self._version_N.max())),
        )

    def _weigh(self) -> np.ndarray:
        slow = Timer(SLOW_S, log.warning, (f"event=sampler_slow domain={self._name} no group starts while it runs",))
        slow.start()
        try:
            weights_N = np.asarray(self._function(self.pool(), **self._kwargs), dtype=np.float64)
        except Exception as error:  # the user's function
            raise DomainError(f"`{KEY}` raised {describe_error(error)}") from error
        finally:
            slow.cancel()
        wanted = (len(self._problems),)
        if weights_N.shape != wanted or not np.isfinite(weights_N).all() or (weights_N < 0).any():
            raise DomainError(
                f"`{KEY}` must return a finite weight of at least 0 for each of {wanted[0]} problems, not an array of "
                f"shape {weights_N.shape} with {np.unique(weights_N)[:5].tolist()} …"
            )
        return weights_N


def make_sampler(cfg: Config, name: str, problems: Sequence[Problem], actor: int) -> ProblemSampler | None:
    """Makes the sampler of domain ``name`` with ``problems``. Returns None if `actor.sampler` is null.

    A round has as many problems as an optimizer batch has groups.

    Raises:
        DomainError: the function cannot be imported, or does not take a pool and `actor.sampler_kwargs`.
    """
    dotted, kwargs = cfg.actor.sampler, cfg.actor.sampler_kwargs
    if dotted is None:
        return None
    function = import_named(KEY, dotted)
    check_call(KEY, dotted, function, ("pool",), kwargs, f"{KEY}_kwargs")
    return ProblemSampler(
        problems,
        function,
        kwargs,
        size=max(1, cfg.batch_size // cfg.attempts),
        seed=cfg.seed,
        name=name,
        actor=actor,
        num_actors=cfg.world.replicas,
    )


def try_sampler(cfg: Config, name: str, problems: Sequence[Problem]) -> None:
    """Draws two rounds as the run will, the second with a history. Raises ``DomainError`` that says what is wrong."""
    sampler = make_sampler(cfg, name, problems, actor=0)
    if sampler is None:
        return
    seen = sampler.draw(0)
    figures = itertools.product((0.0, 0.5, 1.0), (0.0, 0.5))
    sampler.restore(
        {
            index: ProblemHistory(groups=1, success=success, spread=spread, version=0)
            for index, (success, spread) in zip(seen, itertools.cycle(figures), strict=False)
        }
    )
    sampler.draw(1)
