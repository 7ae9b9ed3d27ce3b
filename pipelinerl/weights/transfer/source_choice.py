"""Chooses the source of one pull, and changes it when its link is slow. Pure: reads no clock and sends nothing.

A puller is the last link of a path: trainer → … → source → puller. Its bytes come slowly for one of three reasons, and
what its source says of itself tells which.

- *The link is the limit*: the source has more bytes than it gets through. Its uplink is slow, or our downlink.
- *The source is at its limit*: it has no more bytes than we have, because its own downlink is slow.
- *Something is slow further up*: then others are nearer to it, and mend it.

Slow is always relative to the fastest server on the path, in the same update. What the puller does:

- It leaves a source for the next one that it has not tried when the link has lost `PATIENCE_S`, compared with one that
  has `SLOW` of that server's rate. Lost time is a running sum: a faster link wins it back, and it begins again when the
  puller has all that its source has. So a process that stands still for half a second, on a busy machine, is not left.
- It leaves a source that is at its limit, after `BYPASS_S`, in which the source may find a better one.
- It stays where that costs less than `WORTH_S`.
- If every source was slow, it is slow itself. It goes back to the best one and stays there.
- On the first links of the path no server is known that could be faster. There it tries the trainer once, if the
  update takes longer than before, and stays if that is faster.

A server that is known to be slow does not roam, because every try takes from the uplink of a healthy one.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

SLOW = 0.5
"""A link with less than this share of the fastest server's rate is left."""
BELOW, BELOW_S = 0.8, 0.5
"""A link that has lost so much time, compared with one of this share, is what limits those who pull from here."""
PATIENCE_S = 1.0
"""A link is left when it has lost so much time."""
WORTH_S = 1.0
"""A change must save so much time."""
WINDOW_S = 0.5
"""A rate is the mean over at least so long."""
GAP_S = 0.75
"""More time between two messages is not counted: the puller may have stood still, and what came meanwhile follows."""
MEASURED_S = 1.0
"""A link's rate is known when it was the limit for so long."""
BYPASS_S = 2.0
"""Time that a source at its limit has to find a better one itself."""
HELD_S = 0.25
"""Bytes that arrive so long after they were sent were held up by the link."""
AHEAD_BUCKETS = 2
"""A source that is so many buckets ahead of us has more bytes than the link carries."""
DEAD_S = 1e9
"""Stands for infinity, which JSON does not have: seconds of a link over which nothing comes."""
MAX_TRIED = 4
"""A puller tries so many sources before it takes itself for slow."""
TRIAL_S, TRIAL_LEFT_S, TRIAL_SOURCES = 1.0, 2.0, 3
"""The trainer is tried after so long, if so long is left, by a puller with at most so many sources."""
FAIR = 0.92
"""A puller that gets this share of its equal share of an uplink has an equal share."""
SHARED = 3
"""Of so many pullers one that is slow at the rate of an equal share cannot be told from one that is not."""
BETTER = 1.5
"""A trial succeeds if the trainer's link carries so many times as much, together with those who share it."""


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What a source says between two buckets, and how far the puller is."""

    at: float
    """Seconds on any clock of the puller."""
    upto: int
    """Offset that the puller has reached."""
    source_end: int
    """End of the bytes that the source has."""
    held_s: float
    """Seconds that this message was under way."""
    best_rate: float
    """Highest mean rate of a server from the source upwards. 0 = not known."""
    pullers: int
    """Pullers that share the source's uplink for this part, with this one."""
    given: int
    """Bytes of this part that they have got together."""
    source_is_limited: bool
    """The source is at its limit."""


@dataclass
class Measured:
    """What a link carried while it was the limit."""

    num_bytes: float = 0.0
    given: float = 0.0
    """With those of other pullers of the same source."""
    share: float = 0.0
    """Bytes that an equal share of the source's uplink would have been."""
    seconds: float = 0.0
    taken: int = 0
    """Bytes that came from the source at all."""
    failed: bool = False
    """The source died or fell silent."""

    @property
    def rate(self) -> float:
        """Bytes per second. Infinity = the link was never the limit."""
        if self.failed:
            return 0.0
        return self.carried / self.seconds if self.seconds >= MEASURED_S else math.inf

    @property
    def carried(self) -> float:
        """Bytes that the link could have carried.

        A puller that got less than its share of the source's uplink was limited by its own downlink.
        """
        return max(self.given, self.num_bytes) if self.num_bytes >= FAIR * self.share else self.num_bytes

    @property
    def is_shared(self) -> bool:
        """Whether the puller had its equal share of an uplink that is shared by `SHARED` or more.

        A slow downlink may carry just as much, so this shows how fast the source is, and nothing about the puller.
        """
        return self.num_bytes >= FAIR * self.share and self.given > (SHARED - 0.5) * self.share > 0

    def add(self, first: Sight, last: Sight) -> None:
        """Adds what came between two sights at which the link was the limit."""
        given = last.given - first.given
        self.num_bytes += last.upto - first.upto
        self.given += given
        self.share += given / last.pullers
        self.seconds += min(last.at - first.at, GAP_S)


class SourceChoice:
    """The choice among the sources of one part.

    Args:
        count: number of sources, nearest first, the trainer last.
        start, end: the bytes of the part.
        bucket_bytes: see `WeightUpdateRequest`.
        expected_s: seconds that the fastest server needed lately. 0 = not known.
        roams: whether a slow source is left.
    """

    def __init__(
        self, count: int, *, start: int, end: int, bucket_bytes: int, expected_s: float = 0.0, roams: bool = True
    ):
        self.index = 0
        """The source in use."""
        self.links = [Measured() for _ in range(count)]
        self.healthy_rate = 0.0
        """Highest mean rate of a server in this update, as far as is known here. 0 = not known."""
        self.is_limited = False
        """No source was faster, or the link in use is the limit: the trainer's, or one below the rate of others."""
        self.is_own_limit = False
        """The link in use is the limit, and no other source is faster or may be tried."""
        self._start, self._end, self._ahead = start, end, AHEAD_BUCKETS * bucket_bytes
        self._expected_s, self._roams = expected_s, roams
        self._first: Sight | None = None
        """The first one of this leg."""
        self._sights: deque[Sight] = deque()
        """Of this leg, the newest last."""
        self._rates: dict[int, float] = {}
        """Last rate of each source that was tried."""
        self._slow = Measured()
        """The run in which the link in use was the limit, and lost time."""
        self._below = Measured()
        """The same, compared with a link that has `BELOW` of the best rate."""
        self._starved = Measured()
        """The run in which the source in use was at its limit, and lost time."""
        self._ceiling = math.inf
        """The best rate that any source gives. Infinity = not all were tried."""
        self._home: int | None = None
        """The source before a trial of the trainer."""
        self._has_tried_trainer = False

    def shares(self, size: int) -> list[tuple[float, float]]:
        """Returns for each source its share of ``size`` bytes and the seconds that all would have taken over its link.

        0 seconds = the link was never the limit.
        """
        if size == 0:  # a worker may keep nothing of a stripe
            return [(0.0, 0.0) for _ in self.links]
        return [(link.taken / size, size / link.rate if link.rate else DEAD_S) for link in self.links]

    @property
    def shared(self) -> list[bool]:
        """For each source whether its link says nothing about the puller."""
        return [link.is_shared for link in self.links]

    def took(self, num_bytes: int) -> None:
        """Counts bytes of the source in use."""
        self.links[self.index].taken += num_bytes

    def die(self) -> None:
        """Records that the source in use died or fell silent."""
        self.links[self.index].failed = True

    def fail(self) -> None:
        """Goes on to the next source, because this one does not deliver."""
        self._go((self.index + 1) % len(self.links))

    def see(self, sight: Sight) -> str:
        """Takes a message of the source. Returns why the source is left, empty if it is not. ``index`` is the new one.

        The messages of one source come in order. The first one after a change is of the new source.
        """
        self.healthy_rate = max(self.healthy_rate, sight.best_rate)
        self._first = self._first or sight
        self._measure(sight)
        self._sights.append(sight)
        while len(self._sights) > 2 and self._sights[1].at <= sight.at - BYPASS_S:
            self._sights.popleft()
        link_is_limit, has_tried_all = self._link_is_limit(), self._ceiling < math.inf
        is_below = self.index == len(self.links) - 1 or self._lost_s(self._below, BELOW) >= BELOW_S
        self.is_limited = has_tried_all or (link_is_limit and is_below)
        self.is_own_limit = link_is_limit and (has_tried_all or not self._roams or len(self.links) == 1)
        rate = self._rate_over(WINDOW_S)
        if rate is None or not self._roams or len(self.links) == 1:
            return ""
        self._rates[self.index] = rate
        return self._judge(sight, rate)

    def _judge(self, sight: Sight, rate: float) -> str:
        if self._home is not None:
            tried = self.links[self.index].rate
            if tried == math.inf:
                return ""
            home, self._home = self._home, None
            if tried < BETTER * self._rates[home]:
                self._ceiling = max(tried, self._rates[home])
                self._go(home)
                return f"gives {_mb(tried)}, no more than the source before it"
        if self._lost_s(self._slow) >= PATIENCE_S and self._is_worth(self._slow, sight):
            self.links[self.index] = replace(self._slow, taken=self.links[self.index].taken)
            return self._leave(f"gives {_mb(rate)} of the {_mb(self.healthy_rate)} that a server got")
        if self._link_is_limit() or not sight.source_is_limited:
            return ""
        if self._lost_s(self._starved) >= BYPASS_S and self._is_worth(self._starved, sight):
            return self._leave(f"gets {_mb(rate)} itself, and another server got {_mb(self.healthy_rate)}")
        if self._wants_trial(sight):
            self._home, self._has_tried_trainer = self.index, True
            self._rates[self.index] = self._rate_over(BYPASS_S) or rate
            self._go(len(self.links) - 1)
            return f"gives {_mb(rate)}, and the trainer may give more"
        return ""

    def _is_worth(self, run: Measured, sight: Sight) -> bool:
        """Whether the rest would come `WORTH_S` earlier at the best rate than as it came in this run."""
        left, best = self._end - sight.upto, min(self.healthy_rate, self._ceiling)
        return left * run.seconds >= (WORTH_S + left / best) * run.carried

    def _wants_trial(self, sight: Sight) -> bool:
        first = self._first
        if self._has_tried_trainer or len(self.links) > TRIAL_SOURCES or self.index == len(self.links) - 1:
            return False
        if first is None or sight.at - first.at < (BYPASS_S if self._expected_s else TRIAL_S):
            return False
        rate = (sight.upto - first.upto) / (sight.at - first.at)
        if rate * TRIAL_LEFT_S > self._end - sight.upto:
            return False
        return self._expected_s == 0 or self._end - self._start > rate * (2.0 * self._expected_s + 0.5)

    def _link_is_limit(self) -> bool:
        """Whether the source had more bytes than the link carried, for the whole of the last window."""
        if len(self._sights) < 2:
            return False
        first = self._begin_of(WINDOW_S)
        return all(self._is_ahead(sight) for sight in list(self._sights)[first + 1 :])

    def _is_ahead(self, sight: Sight) -> bool:
        return sight.held_s >= HELD_S or sight.source_end >= min(sight.upto + self._ahead, self._end)

    def _begin_of(self, seconds: float) -> int:
        """Returns the number of the newest sight that is at least so old, else of the oldest."""
        last = self._sights[-1].at - seconds
        return max((n for n, sight in enumerate(self._sights) if sight.at <= last), default=0)

    def _rate_over(self, seconds: float) -> float | None:
        first, last = self._sights[self._begin_of(seconds)], self._sights[-1]
        if last.at - first.at < seconds:
            return None
        return (last.upto - first.upto) / (last.at - first.at)

    def _measure(self, sight: Sight) -> None:
        """Counts what came since the last message. A run ends when it has lost no time, or its cause is gone."""
        if not self._sights:
            return
        before = self._sights[-1]
        link_was_limit = self._is_ahead(before) and self._is_ahead(sight)
        source_was_limit = not link_was_limit and before.source_is_limited and sight.source_is_limited
        if link_was_limit:
            self.links[self.index].add(before, sight)
            self._slow.add(before, sight)
            self._below.add(before, sight)
        if source_was_limit:
            self._starved.add(before, sight)
        if not link_was_limit or self._lost_s(self._slow) <= 0:
            self._slow = Measured()
        if not link_was_limit or self._lost_s(self._below, BELOW) <= 0:
            self._below = Measured()
        if not source_was_limit or self._lost_s(self._starved) <= 0:
            self._starved = Measured()

    def _lost_s(self, run: Measured, share: float = SLOW) -> float:
        """Returns the seconds more than with this share of the best rate. 0 = the best rate is not known."""
        best = min(self.healthy_rate, self._ceiling)
        return run.seconds - run.carried / (share * best) if best else 0.0

    def _leave(self, reason: str) -> str:
        count = len(self.links)
        others = [(self.index + step) % count for step in range(1, count)]
        untried = [index for index in others if index not in self._rates]
        if untried and len(self._rates) < MAX_TRIED:
            self._go(untried[0])
            return reason
        self._ceiling = max(self._rates.values())
        best = min((index for index, rate in self._rates.items() if rate == self._ceiling), default=self.index)
        if best == self.index:
            return ""
        self._go(best)
        return reason

    def _go(self, index: int) -> None:
        self.index, self._first = index, None
        self._slow, self._below, self._starved = Measured(), Measured(), Measured()
        self._sights.clear()


def _mb(rate: float) -> str:
    return f"{1e-6 * rate:.3g} MB/s"
