"""Who pulls from whom: a pipelined chain of all workers, one per stripe. Pure.

A chain sends every byte once over every link: the trainer's link carries the model once whatever the number of
servers, and each worker receives and forwards it once. A tree of degree two would halve the rate, because each inner
worker's link carries every byte twice; it wins only where the model is smaller than (number of workers) buckets
(docs/algorithms.md §11). A broadcast group fails as a whole with its first member.
"""

from collections.abc import Sequence
from itertools import pairwise

from pipelinerl.weights.protocol import Address, Part

BACKUPS = 3
"""Workers before the first source whom a worker may pull from when that one fails; the trainer comes after them."""
PIPELINE_SHARE = 16
"""The last worker of a chain ends at most 1 / this share of a transfer after the first."""
MIN_BUCKET_BYTES = 128 << 10
"""Smaller buckets cost more in calls than they gain."""

Server = Sequence[Address]
"""Addresses of one server's workers."""
Origin = tuple[tuple[int, int], Address]
"""A stripe's (start, end) and the trainer's rank that has it."""
Route = tuple[tuple[Part, ...], ...]
"""For each worker of a server the parts that it pulls."""


def stripes(num_bytes: int, count: int, unit: int) -> list[tuple[int, int]]:
    """``count`` ranges of whole ``unit`` bytes that cover ``num_bytes``, as equal as can be; none is empty."""
    units = -(-num_bytes // unit)
    edges = [min(units * i // count * unit, num_bytes) for i in range(count)] + [num_bytes]
    return [(start, end) for start, end in pairwise(edges) if start < end]


def bucket_bytes(largest: int, num_bytes: int, num_workers: int) -> int:
    """Bytes that a worker waits for before it passes them on: at most ``largest``, less in a long chain."""
    fine = num_bytes // (PIPELINE_SHARE * max(num_workers, 1)) // 64 * 64
    return max(min(largest, max(fine, MIN_BUCKET_BYTES)), 64)


def chain(servers: Sequence[Server], origins: Sequence[Origin]) -> list[Route]:
    """Routes of servers that all lack the same bytes.

    Args:
        servers: the most dependable first.
        origins: every stripe and who has it. Each stripe has a chain of its own that begins at another server, so that
            no link carries the beginning of all of them.
    """
    parts: list[list[list[Part]]] = [[[] for _ in server] for server in servers]
    for stripe, ((start, end), origin) in enumerate(origins):
        first = stripe * len(servers) // len(origins)
        order = [*range(first, len(servers)), *range(first)]
        before: list[Address] = []
        for index in order:
            for worker, address in enumerate(servers[index]):
                sources = (*before[: -BACKUPS - 2 : -1], origin)
                parts[index][worker].append(Part(start=start, end=end, sources=sources))
                before.append(address)
    return [tuple(tuple(worker) for worker in server) for server in parts]


def join(server: Server, holders: Sequence[Server], origins: Sequence[Origin]) -> Route:
    """The route of one server that comes late: from servers that have the bytes already, then from the trainer."""
    parts: list[tuple[Part, ...]] = []
    for worker in range(len(server)):
        near = [*reversed(server[:worker]), *(holder[worker % len(holder)] for holder in holders)][: BACKUPS + 1]
        parts.append(tuple(Part(start=s, end=e, sources=(*near, origin)) for (s, e), origin in origins))
    return tuple(parts)
