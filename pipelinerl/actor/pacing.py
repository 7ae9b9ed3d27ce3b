"""Decides when the next group may start, and of which domain: the pacing rule of docs/pacing.md. No I/O.

Samples are trained in publication order, ``batch_size`` units (rollouts, or their texts) per optimizer step, so what is
dispatched and not dropped tells at which version the next sample will be trained. A drop makes room at once.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """The bound on what is dispatched and not dropped, in units of `finetune.batch_unit`.

    Example:
        >>> Pacing(batch_size=64, max_lag_steps=2, max_train_steps=100).limit(version=5)
        512
    """

    batch_size: int
    max_lag_steps: int | None
    """Optimizer steps that generation may run ahead of training. None: only the end of training is a bound."""
    max_train_steps: int
    schedule: Literal["pipeline", "conventional"] = "pipeline"
    steps_per_phase: int = 1
    """Optimizer steps whose data are generated on one version. Only schedule "conventional" reads it."""
    actor: int = 0
    num_actors: int = 1

    def limit(self, version: int) -> int:
        """Returns the largest number of units, dispatched and not dropped, of this actor while ``version`` is live.

        Actor r of n fills the optimizer steps with ``step % n == r``, as preprocessor r packs them.
        """
        steps = self.max_train_steps
        if self.schedule == "conventional":
            steps = min(steps, (version // self.steps_per_phase + 1) * self.steps_per_phase)
        elif self.max_lag_steps is not None:
            steps = min(steps, version + 1 + self.max_lag_steps)
        return self.batch_size * len(range(self.actor, steps, self.num_actors))

    @property
    def most_running(self) -> float:
        """The most units that may be under way while those of one step are being trained."""
        return (
            math.inf if self.max_lag_steps is None else self.batch_size * max(1, self.max_lag_steps) / self.num_actors
        )

    def may_start(self, *, dispatched: float, dropped: int, version: int) -> bool:
        """Returns whether another group may start.

        Args:
            dispatched: units of the samples that this actor has dispatched since the start of the run.
            dropped: those of them that will fill no batch.
        """
        return dispatched - dropped < self.limit(version)

    def holds(self, *, dispatched: float, dropped: int, version: int) -> bool:
        """Returns whether a newer version would let another group start. Arguments as those of ``may_start``."""
        return self.limit(version) <= dispatched - dropped < self.limit(self.max_train_steps)


MAX_COMPENSATION = 4
"""A domain whose groups are dropped gets at most this many times its weight's share of the rollouts."""


def furthest_behind(weights: Sequence[float], counts: Sequence[float], among: Collection[int]) -> int:
    """Returns the index of the domain whose count falls furthest short of its weight's share of all counts.

    Args:
        weights, counts: of all domains. Counts are in samples.
        among: indices of the domains to choose from.

    Example:
        >>> furthest_behind([0.6, 0.3, 0.1], [16, 8, 0], among={0, 1, 2})
        2
    """
    total_weight, total = sum(weights), sum(counts)
    return max(among, key=lambda i: (total * weights[i] / total_weight - counts[i], weights[i], -i))


def counted(*, resolved: int, published: int, dropped_later: int) -> float:
    """Returns a domain's contribution in samples.

    Args:
        resolved: attempts of its groups that were published or dropped.
        published: its samples on topic `actor`.
        dropped_later: published samples that the preprocessor dropped.
    """
    return max(published - dropped_later, resolved / MAX_COMPENSATION)
