"""Decides when the next group may start: the pacing rule of docs/architecture.md.

Samples are trained in publication order, exactly ``batch_size`` per optimizer step. The number of samples dispatched
and not dropped therefore tells at which version the next sample will be trained. A drop (failure, filter, lag) makes
room at once, so no filter can starve training. ``max_lag_steps`` 0 gives synchronous training. The module does no I/O.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """The bound on samples dispatched minus samples dropped.

    Example:
        >>> Pacing(batch_size=64, max_lag_steps=2, max_train_steps=100).limit(version=5)
        512
    """

    batch_size: int
    max_lag_steps: int | None
    """Largest number of optimizer steps between sampling and training. None: only the end of training is a bound."""
    max_train_steps: int
    schedule: Literal["pipeline", "conventional"] = "pipeline"
    steps_per_phase: int = 1
    """Optimizer steps whose data are generated on one version. Only schedule "conventional" reads it."""
    actor: int = 0
    num_actors: int = 1

    def limit(self, version: int) -> int:
        """Returns the largest number of samples, dispatched minus dropped, of this actor while ``version`` is live.

        Actor r of n fills the optimizer steps with ``step % n == r``, as preprocessor r packs them.
        """
        steps = self.max_train_steps
        if self.schedule == "conventional":
            steps = min(steps, (version // self.steps_per_phase + 1) * self.steps_per_phase)
        elif self.max_lag_steps is not None:
            steps = min(steps, version + 1 + self.max_lag_steps)
        return self.batch_size * len(range(self.actor, steps, self.num_actors))

    def may_start(self, *, dispatched: int, dropped: int, version: int) -> bool:
        """Returns whether another group may start.

        Args:
            dispatched: samples that this actor has dispatched since the start of the run.
            dropped: those of them that will never be trained.
            version: the live weight version.
        """
        return dispatched - dropped < self.limit(version)
