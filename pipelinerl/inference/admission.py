"""How many rollouts a server takes at a time with `actor.llm_max_rollouts=auto` (docs/weights.md). Pure.

The rule is that of congestion control in networks (RFC 5681), with rollouts for packets: a finished one lets the limit
grow, twofold per turn until the cache was full for the first time, and a full cache lowers it.
"""

from dataclasses import dataclass

from pipelinerl.config.servers import FIRST_ROLLOUTS, MOST_ROLLOUTS

GROWTH = 0.1
"""Share of the limit that one turn of all rollouts adds after the first congestion."""
DECREASE = 0.8
"""Share of the limit that is left after a congestion."""
NEARLY_FULL = 0.85
"""Share of the cache in use above which the limit does not grow."""
FULL = 0.97
"""Share of the cache in use above which waiting requests are a congestion. Some blocks are always free."""
USED = 0.5
"""The limit grows only while at least this share of it is in use. Rollouts in their tools are not at the server."""
QUEUE = 0.1
"""The limit does not grow while more than this share of the rollouts waits."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A server's load, and what has happened since the last look."""

    kv_use: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    running: int = 0
    waiting: int = 0
    finished: int = 0
    """Requests that ended since the last look."""
    preempted: int = 0
    """Requests that lost their place in the cache since the last look, and must be computed again."""

    @property
    def is_congested(self) -> bool:
        return self.preempted > 0 or (self.waiting > 0 and self.kv_use >= FULL)


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The limit of one server and its history.

    >>> Admission(limit=32.0).after(Load(kv_use=0.2, running=32, finished=8)).rollouts
    40
    """

    limit: float = float(FIRST_ROLLOUTS)
    is_first_climb: bool = True
    """Whether the cache was never full."""
    until_decrease: float = 0.0
    """Rollouts that must finish before the limit may fall again."""

    @property
    def rollouts(self) -> int:
        """Rollouts that the server takes at a time."""
        return int(self.limit)

    def after(self, load: Load) -> "Admission":
        """Return the admission after a look at the server."""
        waits = max(self.until_decrease - load.finished, 0.0)
        if load.is_congested:
            if waits:  # the rollouts that made the cache full need a turn to end
                return Admission(limit=self.limit, is_first_climb=False, until_decrease=waits)
            limit = max(min(self.limit, load.running + load.waiting) * DECREASE, 1)
            return Admission(limit=limit, is_first_climb=False, until_decrease=limit)
        is_used = load.running + load.waiting >= USED * self.rollouts
        growth = 0.0
        if is_used and load.kv_use < NEARLY_FULL and load.waiting <= QUEUE * self.limit:
            growth = min(load.finished * (1.0 if self.is_first_climb else GROWTH), self.limit)
        limit = min(self.limit + growth, MOST_ROLLOUTS)
        return Admission(limit=limit, is_first_climb=self.is_first_climb, until_decrease=waits)
