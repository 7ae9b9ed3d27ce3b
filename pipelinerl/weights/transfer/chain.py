"""Chooses the sources of each worker: one pipelined chain of all workers per stripe. Pure.

A tree of degree two would halve the rate, and is faster only if the model is smaller than (number of workers) buckets
(docs/algorithms.md §11). A broadcast group fails as a whole with its first member.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from pipelinerl.weights.protocol import Address, PayloadRange

BACKUPS = 3
"""Number of earlier workers that a worker may pull from if its first source fails. The trainer is the last resort."""
NEIGHBOURS = 32
"""Number of earlier workers of the same server that are asked first."""
PIPELINE_SHARE = 16
"""The last worker of a chain ends at most 1 / this of a transfer's duration after the first."""
MIN_BUCKET_BYTES = 128 << 10
"""Smaller buckets cost more in calls than they gain."""

T = TypeVar("T")
Server = Sequence[Address]
"""Addresses of one server's workers."""
Stripe = tuple[tuple[int, int], Address]
"""A stripe's (start, end) and the trainer's rank that has it."""
Route = tuple[tuple[PayloadRange, ...], ...]
"""The ranges that each worker of a server pulls."""


def stripes(num_bytes: int, count: int, unit: int) -> list[tuple[int, int]]:
    """Splits ``num_bytes`` into up to ``count`` non-empty ranges, as equal as multiples of ``unit`` bytes allow."""
    units = -(-num_bytes // unit)
    edges = [min(units * i // count * unit, num_bytes) for i in range(count)] + [num_bytes]
    return [(start, end) for start, end in pairwise(edges) if start < end]


def bucket_bytes(largest: int, num_bytes: int, num_workers: int) -> int:
    """Returns the bytes that a worker collects before it forwards them: at most ``largest``, less in a long chain.

    Args:
        num_bytes: of one stripe.
        num_workers: workers in its chain.
    """
    fine = num_bytes // (PIPELINE_SHARE * max(num_workers, 1)) // 64 * 64
    return max(min(largest, max(fine, MIN_BUCKET_BYTES)), 64)


def chain(servers: Sequence[Server], origins: Sequence[Stripe], *, num_last: int = 0) -> list[Route]:
    """Returns the routes of servers that all lack the same bytes.

    The chain of a stripe goes through a node before it enters the next. A server is on the host of its first worker.

    Args:
        origins: every stripe and its source. The chain of each stripe begins at another server, so that no link carries
            the beginning of all chains.
        num_last: number of servers at the end of the list with which every chain ends.
    """
    ranges: list[list[list[PayloadRange]]] = [[[] for _ in server] for server in servers]
    beginning = len(servers) - num_last
    hosts = [server[0].host for server in servers]
    nodes = by_node(range(beginning), lambda index: hosts[index])
    for stripe, ((start, end), origin) in enumerate(origins):
        before: list[Server] = []
        for index in [*_beginning_at(nodes, stripe * beginning // len(origins)), *range(beginning, len(servers))]:
            for worker in range(len(servers[index])):
                sources = (*_near(servers[index], worker, before[: -BACKUPS - 2 : -1]), origin)
                ranges[index][worker].append(PayloadRange(start=start, end=end, sources=sources))
            before.append(servers[index])
    return [tuple(tuple(worker) for worker in server) for server in ranges]


def by_node(servers: Iterable[T], node: Callable[[T], str]) -> list[list[T]]:
    """Groups servers by their node, in the order in which they come."""
    nodes: dict[str, list[T]] = {}
    for server in servers:
        nodes.setdefault(node(server), []).append(server)
    return list(nodes.values())


def _beginning_at(nodes: Sequence[Sequence[int]], place: int) -> list[int]:
    """Returns all servers node by node, beginning with the one at this place. The rest of its node follows it."""
    for number, node in enumerate(nodes):
        if place < len(node):
            others = [*nodes[number + 1 :], *nodes[:number]]
            return [*node[place:], *node[:place], *(index for other in others for index in other)]
        place -= len(node)
    return []


def join(server: Server, holders: Sequence[Server], origins: Sequence[Stripe]) -> Route:
    """Returns the route of a late server: from ``holders``, which have all bytes, then from the trainer."""
    ranges: list[tuple[PayloadRange, ...]] = []
    for worker in range(len(server)):
        near = _near(server, worker, holders)
        ranges.append(tuple(PayloadRange(start=s, end=e, sources=(*near, origin)) for (s, e), origin in origins))
    return tuple(ranges)


def _near(server: Server, worker: int, others: Sequence[Server]) -> list[Address]:
    """Returns the sources of a worker before the trainer, nearest first."""
    # Those that keep another shard refuse at once. Workers with the same number keep the same shard.
    return [*server[max(worker - NEIGHBOURS, 0) : worker][::-1], *(other[worker % len(other)] for other in others)]
