"""Which servers are slow to send or to receive, by what their workers saw of their sources (docs/weights.md). Pure.

An end of a link is a server, or its node where the link leaves the node: servers of a node share its network card.
"""

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from pipelinerl.weights import protocol
from pipelinerl.weights.protocol import Address

log = logging.getLogger(__name__)

SLOW, SLOW_S = 2.0, 0.5
"""A link is slow if it takes more than ``SLOW`` times as long as the fastest, and more than ``SLOW_S`` longer. Two
pullers that share an uplink are not slow, nor is a process that pauses for half a second on a busy host."""
LEAST_SHARE, LEAST_S = 0.25, 2.0
"""A figure counts if it covers this share of a part, or this many seconds: less may have come out of buffers, or while
a process paused."""
KEPT = 16
"""Updates for which a figure counts. A slow link is tried again after this many without a new figure."""
COMPARED = 4
"""Updates whose fastest links are the measure. If the first server of a chain is slow, only an earlier one shows it."""
HEADS = 3
"""Servers with which the first chains begin, besides those that turned out to be slow. The link of a single head has
nothing to be compared with, and of two one may be slow as well."""
TRAINER = ""


class Edge(NamedTuple):
    """A link from one end to another."""

    giver: str
    """A server, its node where the link leaves the node, or `TRAINER`."""
    taker: str
    """A server, or its node."""
    kind: str


class Figure(NamedTuple):
    """What the newest update showed of a link."""

    update: int
    num_bytes: int
    """Length of the part."""
    pace: float
    """Seconds per byte: the link is at least that fast."""
    ahead: float
    """Seconds per byte while the source was ahead: the cost of the link itself. 0 = the link was not the limit."""

    def is_slow(self, per_byte: float, least: float) -> bool:
        """Whether the part is slow at ``per_byte`` seconds per byte, if the best of its kind has ``least``."""
        return is_slow(per_byte * self.num_bytes, least * self.num_bytes)


class Server(NamedTuple):
    """The server of a worker, and its node."""

    name: str
    node: str


End = tuple[str, str]
"""("gives", server or node) or ("takes", server or node)."""


def is_slow(seconds: float, least_s: float) -> bool:
    return seconds > max(SLOW * least_s, least_s + SLOW_S)


def slow_ends(figures: Mapping[Edge, Figure], best: Mapping[str, float]) -> set[End]:
    """Returns the fewest ends that explain the slow links. Where either end would, both are in doubt, and slow.

    Args:
        best: the fastest pace of each kind of links. Links of another kind say nothing.
    """

    def exceeds(link: Edge, per_byte: float) -> bool:
        return figures[link].is_slow(per_byte, best[link.kind])

    def ends(link: Edge) -> set[End]:
        return {("gives", link.giver), ("takes", link.taker)}

    known = [link for link in figures if link.kind in best]
    slow = {link for link in known if exceeds(link, figures[link].ahead)}
    newest = Counter[End]()  # of each end: the update of its newest slow link
    for link in slow:
        newest |= Counter(dict.fromkeys(ends(link), figures[link].update))  # | keeps the larger one
    fast = [link for link in known if not exceeds(link, figures[link].pace)]
    well = {end for link in fast for end in ends(link) if figures[link].update >= newest[end]}
    well.add(("gives", TRAINER))  # nobody can replace it
    found = set[End]()
    while counts := Counter(end for link in slow for end in ends(link) - well):
        most = max(counts.values())
        found |= {end for end, count in counts.items() if count == most}
        slow = {link for link in slow if not ends(link) & found}
    return found


class LinkTable:
    """The newest figure of every link, and what it says of the servers since the last ``plan``."""

    def __init__(self) -> None:
        self.update = 0
        """Number of planned updates. Versions may be skipped, so theirs do not count."""
        self.turn = 0
        """Number of servers and nodes by which the beginning of the chain has moved."""
        self.slow_uplinks = self.slow_downlinks = frozenset[str]()
        """Names of servers that are slow to send, and to receive."""
        self.returned = set[str]()
        """Servers that were slow until their figures were forgotten. Nobody should wait for them yet."""
        self._figures: dict[Edge, Figure] = {}
        self._paces: dict[int, dict[str, float]] = {}
        """Update → the fastest pace of each kind in its chains."""

    @property
    def slow(self) -> frozenset[str]:
        return self.slow_uplinks | self.slow_downlinks

    def plan(self, nodes: Mapping[str, str], heads: int = 1) -> None:
        """Judges the servers for the next update.

        Args:
            nodes: the node of every server.
            heads: chains that begin at different servers in each update.
        """
        self.update += 1
        ends = {TRAINER, *nodes, *nodes.values()}
        here = {link: seen for link, seen in self._figures.items() if {link.giver, link.taker} <= ends}
        self._figures = {link: seen for link, seen in here.items() if self.update - seen.update <= KEPT}
        forgotten = {end for link in here.keys() - self._figures.keys() for end in (link.giver, link.taker)}
        self._paces = {update: paces for update, paces in self._paces.items() if self.update - update <= COMPARED}
        found = slow_ends(self._figures, self._best())
        before, gave, took = self.slow, self.slow_uplinks, self.slow_downlinks
        gives, takes = ({end for does, end in found if does == what} for what in ("gives", "takes"))
        self.slow_uplinks = frozenset(name for name, node in nodes.items() if {name, node} & gives)
        self.slow_downlinks = frozenset(name for name, node in nodes.items() if {name, node} & takes)
        self.returned |= {name for name in before - self.slow if {name, nodes.get(name)} & forgotten}
        self.returned &= nodes.keys()
        if self.update > 1 and (self.turn + 1) * heads < HEADS + len(self.slow_downlinks):
            self.turn += 1
        for name in sorted((gave ^ self.slow_uplinks) | (took ^ self.slow_downlinks)):
            log.warning(
                "event=server_pace server=%s slow_uplink=%s slow_downlink=%s",
                name,
                name in self.slow_uplinks,
                name in self.slow_downlinks,
            )

    def record(
        self,
        update: int,
        taker: Server,
        seen: Iterable[protocol.Link],
        owners: Mapping[Address, Server],
        planned: Collection[Address],
        *,
        is_chained: bool,
    ) -> None:
        """Records what the workers of a server saw of their sources. Of several figures of a link, the worst counts.

        Args:
            update: number of the update in which the server was to get the version.
            owners: of the workers' addresses. All others are the trainer's.
            planned: the sources that the workers had first. The trainer's link counts for those who begin a chain. A
                late pull from it clears if it was fast, and else says nothing: it may give to others as well.
            is_chained: figures of later pulls are compared and are no measure: an idle source is faster than any chain.
        """
        best = self._best()
        for one in seen:
            giver = owners.get(one.source, Server(TRAINER, one.source.host))
            if giver.name == taker.name or (giver.name == TRAINER and one.source not in planned):
                continue
            link = _link(giver, taker, one.transport)
            if not one.num_bytes or (one.num_bytes < LEAST_SHARE * one.part_bytes and one.seconds < LEAST_S):
                continue
            figure = Figure(update, one.part_bytes, one.seconds / one.num_bytes, one.ahead_s / one.num_bytes)
            is_late_from_trainer = giver.name == TRAINER and not is_chained
            if is_late_from_trainer and (link.kind not in best or figure.is_slow(figure.pace, best[link.kind])):
                continue
            if is_chained:
                paces = self._paces.setdefault(update, {})
                paces[link.kind] = min(paces.get(link.kind, figure.pace), figure.pace)
            known = self._figures.get(link)
            if known is None or known.update < update:
                self._figures[link] = figure
            elif known.update == update:
                self._figures[link] = max(known, figure, key=lambda figure: (figure.ahead, figure.pace))

    def had_slow_downlink(self, update: int, taker: Server) -> bool:
        """Whether a link to this server was slow in this update, and its source is not in doubt."""
        best, ends = self._best(), {taker.name, taker.node}
        found = slow_ends(self._figures, best)
        return any(
            figure.is_slow(figure.ahead, best[link.kind])
            and ("takes", link.taker) in found
            and ("gives", link.giver) not in found
            for link, figure in self._figures.items()
            if link.taker in ends and link.kind in best and figure.update == update
        )

    def expected_s(self, num_bytes: int) -> float:
        """Returns the seconds that ``num_bytes`` take over the slowest kind of link. 0 = no link was seen."""
        return num_bytes * max(self._best().values(), default=0.0)

    def _best(self) -> dict[str, float]:
        best: dict[str, float] = {}
        for paces in self._paces.values():
            for kind, pace in paces.items():
                best[kind] = min(best.get(kind, pace), pace)
        return best


def _link(giver: Server, taker: Server, transport: str) -> Edge:
    if giver.node == taker.node:
        return Edge(giver.name, taker.name, f"node over {transport}")
    return Edge(giver.name and giver.node, taker.node, f"network over {transport}")
