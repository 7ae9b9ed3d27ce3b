"""Plans the update of each server to one version: payload and sources. Pure: changes neither offers nor members.

docs/weights.md says which servers are in a chain, and which are late.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.links import LinkTable
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.weights.publish.versions import Dispatch, PendingVersion
from pipelinerl.weights.transfer import chain

T = TypeVar("T")


def in_order(pool: Iterable[ServerClient], turn: int) -> list[ServerClient]:
    """Returns servers node by node. Every turn begins one node further, and in each node one server further.

    Late servers are included, so that the others keep their neighbours when one becomes slow.
    """
    numbered = sorted(pool, key=lambda client: (client.job.replica_idx, client.name))
    nodes = [_turned(node, turn) for node in chain.by_node(numbered, lambda client: client.node)]
    return [client for node in _turned(nodes, turn) for client in node]


def _turned(items: Sequence[T], turn: int) -> list[T]:
    first = turn % max(len(items), 1)
    return [*items[first:], *items[:first]]


def chained(
    pending: PendingVersion,
    ready: Sequence[ServerClient],
    links: LinkTable,
    ranks: Sequence[Address],
    bucket_bytes: int,
) -> list[Dispatch]:
    """Plans the chains of the servers that hold the delta's base, and those of all others that are not late.

    Args:
        ready: `in_order`.
        ranks: addresses of the trainer's ranks, each of which has one stripe.
    """
    fit = [client for client in ready if not client.is_suspect and client.name not in links.slow_downlinks]
    givers = [client for client in fit if client.name in links.slow_uplinks]
    returned = [client for client in fit if client.name in links.returned and client not in givers]
    well = [client for client in fit if client not in givers and client not in returned]
    last = [*returned, *givers[:1]] if well else []
    order = [*well, *last] or list(ready)  # if nobody is well, someone has to begin
    with_base = [client for client in order if pending.deltas is not None and client.held == pending.base_version]
    without = [client for client in order if client not in with_base]
    dispatches = []
    for clients, base_version in ((with_base, pending.base_version), (without, None)):
        if not clients:
            continue
        ranges = pending.ranges(base_version)
        num_bytes = sum(end - start for start, end in ranges)
        num_workers = sum(len(client.workers) for client in clients)
        bucket = chain.bucket_bytes(bucket_bytes, num_bytes // max(len(ranges), 1), num_workers)
        routes = chain.chain(
            [client.workers for client in clients],
            list(zip(ranges, ranks, strict=False)),
            num_last=sum(client in last for client in clients) % len(clients),
        )
        for client, route in zip(clients, routes, strict=True):
            dispatches.append(
                Dispatch(
                    client=client, route=route, num_bytes=num_bytes, bucket_bytes=bucket, base_version=base_version
                )
            )
    return dispatches


def late(
    pending: PendingVersion,
    ready: Iterable[ServerClient],
    holders: Iterable[ServerClient],
    links: LinkTable,
    ranks: Sequence[Address],
    bucket_bytes: int,
    *,
    is_overdue: bool = False,
) -> list[Dispatch]:
    """Plans the pulls of late servers that can begin now. The others wait for a server that is free.

    A node takes the version once from elsewhere, and its other servers get it from there. The trainer gives to one at a
    time, when no chain is under way.

    Args:
        holders: servers that serve the version.
        is_overdue: the version should have come long ago, so the trainer gives it to all that find no free server.
    """
    pulls = list(pending.pulls.values())
    free = [client for client in holders if client.name not in links.slow_uplinks]
    dispatches: list[Dispatch] = []
    for client in sorted(ready, key=lambda client: _urgency(client, links)):
        under_way = [*pulls, *dispatches]
        busy = frozenset[Address]().union(*(pull.givers for pull in under_way))
        own_node = [holder for holder in free if holder.node == client.node]
        is_on_node = own_node or any(pull.client.node == client.node for pull in under_way)
        givers = own_node if is_on_node else free
        giver = next((holder for holder in givers if busy.isdisjoint(holder.workers)), None)
        trainer_is_busy = any(pull.is_chained for pull in under_way) or not busy.isdisjoint(ranks)
        if giver is None and (is_on_node or trainer_is_busy) and not is_overdue:
            continue
        dispatches.append(_late_pull(pending, client, giver, ranks, bucket_bytes))
    return dispatches


def _urgency(client: ServerClient, links: LinkTable) -> tuple[bool, int]:
    """Those that are soon free to give it on come first, then those that are furthest behind."""
    return client.name in links.slow_downlinks, -1 if client.serves is None else client.serves


def _late_pull(
    pending: PendingVersion,
    client: ServerClient,
    giver: ServerClient | None,
    ranks: Sequence[Address],
    bucket_bytes: int,
) -> Dispatch:
    """Pulls the difference if the server holds its base and its source took the difference, too, else all bytes."""
    base_version = None
    if pending.deltas is not None and client.held == pending.base_version:
        base_version = pending.base_version if giver is None or giver.name in pending.took_delta else None
    ranges = pending.ranges(base_version)
    origins = list(zip(ranges, ranks, strict=False))
    return Dispatch(
        client=client,
        route=chain.join(client.workers, [] if giver is None else [giver.workers], origins),
        num_bytes=sum(end - start for start, end in ranges),
        bucket_bytes=bucket_bytes,
        base_version=base_version,
        is_chained=False,
    )
