"""Judges, after an update, which servers are slow to send (`gives_slowly`) or to receive (`takes_slowly`). Pure.

Servers report the links that were a limit (`protocol.Link`). A slow link has two ends, and one of them is at fault.
Whoever did well on another link of the same update is not. If that clears neither, both are taken for slow until the
next update or the gauge clears one: the place at the end of the chain costs a healthy server little, as it shares an
uplink at most with slow ones. A link of which one end is known to be slow says nothing about the other. Between slow
and well nothing is said, and what was known stays: two slow servers that share an uplink look half as slow as they are.

A busy machine may make any number of healthy servers look slow. So those that are slow to receive form a chain, too,
behind the healthy ones (`dispatch.chain_place`), in which nobody shares an uplink. Those of which an update showed no
limit come first (`Standing.limit`): one that is healthy then gets the version as early as the others, which clears it.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipelinerl.weights.protocol import Address, Link

log = logging.getLogger(__name__)

SLOWER, SLOWER_S = 2.0, 0.5
"""A link is slow if it would need so many times the fastest server's seconds, and so many seconds more."""
WELL = 1.5
"""A link is well if it would need at most so many times the fastest server's seconds, or `SLOWER_S` more."""
MAX_PASSES = 64
REMEMBERED = 4
"""Updates after which a rate that nobody reaches any more is forgotten."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one server of a chain got a version."""

    server: str
    seconds: float
    """Until it had all bytes."""
    links: tuple[Link, ...]


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """What the reports of one update show. Servers in no set were not measured."""

    gives_well: frozenset[str] = frozenset()
    gives_slowly: frozenset[str] = frozenset()
    takes_well: frozenset[str] = frozenset()
    takes_slowly: frozenset[str] = frozenset()
    limits: Mapping[str, float] = field(default_factory=dict)
    """Server that reported → how many times the fastest server's seconds its own link would need. 0 = its sources were
    no faster, or it shared an uplink."""


def is_slow(seconds: float, fastest_s: float) -> bool:
    return seconds > max(SLOWER * fastest_s, fastest_s + SLOWER_S)


def is_well(seconds: float, fastest_s: float) -> bool:
    return seconds <= max(WELL * fastest_s, fastest_s + SLOWER_S)


def healthy_s(reports: Sequence[Report]) -> float:
    """Returns the seconds that a healthy server needs in this update: those of the fastest. 0 = no reports.

    A server that had to wait for others would have been as fast as its best link. If slow servers held up most of the
    others, a single one may show how fast all of them could be.
    """
    limits = [link.whole_s for report in reports for link in report.links if link.whole_s]
    return min([*(report.seconds for report in reports), *limits], default=0.0)


class UsualRate:
    """The rate of a healthy server, over the last updates.

    If a slow server is the first of a chain, all others are as slow, and only an earlier update shows it.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Version → seconds per byte."""

    def record(self, version: int, num_bytes: int, reports: Sequence[Report]) -> None:
        """Takes what is known of an update by now."""
        self._seconds[version] = healthy_s(reports) / num_bytes
        for old in sorted(self._seconds)[:-REMEMBERED]:
            del self._seconds[old]

    def seconds(self, num_bytes: int) -> float:
        """Returns the seconds that the fastest server would need for so many bytes. 0 = not known."""
        return num_bytes * min((one for one in self._seconds.values() if one), default=0.0)


def judge_links(
    reports: Sequence[Report],
    servers: Mapping[Address, str],
    known: "Mapping[str, Standing] | None" = None,
    usual_s: float = 0.0,
) -> LinkVerdict:
    """Judges the servers of one chain by the reports that are there.

    Args:
        servers: the server of each worker's address. An address that is not there is the trainer's.
        known: what the servers' standing was before the update. None = all were well.
        usual_s: seconds that a healthy server needed in the last updates (`UsualRate`). 0 = not known.
    """
    fastest_s = min((one for one in (healthy_s(reports), usual_s) if one), default=0.0)
    links = [(servers.get(link.source, ""), report.server, link) for report in reports for link in report.links]
    links = [(source, puller, link) for source, puller, link in links if source != puller]
    measured = [(source, puller, link) for source, puller, link in links if link.whole_s]
    good = [(source, puller) for source, puller, link in measured if is_well(link.whole_s, fastest_s)]
    bad = [(source, puller) for source, puller, link in measured if is_slow(link.whole_s, fastest_s)]
    in_time = {report.server for report in reports if is_well(report.seconds, fastest_s)}
    takes_well = {t for _, t, link in measured if not link.is_shared and is_well(link.whole_s, fastest_s)} | in_time
    gives_well = {source for source, _ in good} | {
        source
        for source, puller, link in links
        if puller in in_time and link.share > 0.5 and not is_slow(link.whole_s, fastest_s)
    }
    known = known or {}
    slow_pullers = {name for name, standing in known.items() if standing.takes_slowly} - takes_well
    slow_sources = {name for name, standing in known.items() if standing.gives_slowly} - gives_well
    # Nobody can replace the trainer, so the puller answers for a slow link to it, as to any source that gives well.
    # Its other links then say nothing about their sources.
    slow_pullers |= {t for source, t in bad if (not source or source in gives_well) and t not in takes_well}
    gives_slowly = {
        s for s, puller in bad if s and s not in gives_well and (s in slow_sources or puller not in slow_pullers)
    }
    takes_slowly = {t for source, t in bad if t not in takes_well and (t in slow_pullers or source not in slow_sources)}
    return LinkVerdict(
        gives_well=frozenset(gives_well - {""}),
        gives_slowly=frozenset(gives_slowly),
        takes_well=frozenset(takes_well),
        takes_slowly=frozenset(takes_slowly),
        limits={
            report.server: min((one.whole_s for one in report.links if one.whole_s and not one.is_shared), default=0.0)
            / (fastest_s or 1.0)
            for report in reports
        },
    )


@dataclass
class Probation:
    """How often in a row a link did well that is known to be slow. So many times are wanted, twice as many each time
    that it was cleared."""

    passes: int = 0
    wanted: int = 1

    def clears(self, *, is_well: bool) -> bool:
        """Takes one look at the link. Returns whether it counts as well again."""
        self.passes = self.passes + 1 if is_well else 0
        if self.passes < self.wanted:
            return False
        self.passes, self.wanted = 0, min(2 * self.wanted, MAX_PASSES)
        return True


@dataclass
class Standing:
    """What is known of one server's links, over updates."""

    gives_slowly: bool = False
    takes_slowly: bool = False
    limit: float = 0.0
    """See ``LinkVerdict.limits``, of its last update."""
    _uplink: Probation = field(default_factory=Probation)
    """Its looks are gauges."""
    _versions: dict[str, int] = field(default_factory=dict)
    """What of it → the newest version of which the update showed this. Older ones change it no more."""

    @property
    def is_slow(self) -> bool:
        return self.gives_slowly or self.takes_slowly

    def judge(self, server: str, version: int, verdict: LinkVerdict) -> None:
        """Takes the verdict on the update to a version. It may change with every report, also with one that comes late.

        What it did not measure stays as it was, and so does what the update to a newer version showed.
        """
        before = (self.gives_slowly, self.takes_slowly)
        if server in verdict.gives_well | verdict.gives_slowly and self._note("gives", version):
            self.gives_slowly = server in verdict.gives_slowly
        if server in verdict.takes_well | verdict.takes_slowly and self._note("takes", version):
            self.takes_slowly = server in verdict.takes_slowly
        if server in verdict.limits and self._note("limit", version):
            self.limit = verdict.limits[server]
        if self.gives_slowly and not before[0]:
            self._uplink.passes = 0
        self._tell(server, before)

    def _note(self, what: str, version: int) -> bool:
        """Notes that the update to a version showed this. Returns whether none to a newer one did."""
        self._versions[what] = max(self._versions.get(what, version), version)
        return version == self._versions[what]

    def fail(self, server: str, version: int) -> None:
        """Records that the server did not get all bytes of a version in time, and that its own link was the limit."""
        before = (self.gives_slowly, self.takes_slowly)
        if self._note("takes", version):
            self.takes_slowly = True
        if self._note("limit", version):
            self.limit = math.inf
        self._tell(server, before)

    def gauge(self, server: str, version: int, seconds: float, fastest_s: float) -> None:
        """Takes a measurement of the uplink, after the update to a version.

        One that clears it is newer than all that this update shows, also in reports that come later.

        Args:
            seconds: that a whole version would take over it.
        """
        before = (self.gives_slowly, self.takes_slowly)
        if self.gives_slowly and self._uplink.clears(is_well=not is_slow(seconds, fastest_s)):
            self.gives_slowly = False
            self._note("gives", version + 1)
        self._tell(server, before)

    def _tell(self, server: str, before: tuple[bool, bool]) -> None:
        if (self.gives_slowly, self.takes_slowly) != before:
            log.warning(
                "event=server_pace server=%s gives_slowly=%s takes_slowly=%s",
                server,
                self.gives_slowly,
                self.takes_slowly,
            )
