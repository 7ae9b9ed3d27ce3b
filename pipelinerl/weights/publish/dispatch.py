"""Plans the update of each server to one version: payload and sources. Pure: changes neither offers nor members."""

from collections.abc import Iterable, Sequence

from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.server_client import ServerClient, UpdateOutcome
from pipelinerl.weights.publish.standing import Report, healthy_s
from pipelinerl.weights.publish.versions import Dispatch, PendingVersion
from pipelinerl.weights.transfer import chain


def chain_place(client: ServerClient) -> tuple[bool, float, bool, bool, str, int]:
    """Sorts servers by their place in a chain: healthy ones, those that failed, those that are slow.

    Of the slow ones come first those that may be fast, and then the less slow ones.
    """
    standing = client.standing
    return (
        standing.is_slow,
        standing.limit if standing.is_slow else 0.0,
        standing.gives_slowly,
        client.is_suspect,
        client.node,
        client.job.replica_idx,
    )


def chained(
    pending: PendingVersion, ready: Sequence[ServerClient], ranks: Sequence[Address], bucket_bytes: int
) -> list[Dispatch]:
    """Plans the chains of the servers that hold the delta's base, and those of all others.

    Reliable servers come first. Slow ones follow, and nobody pulls from one that is slow to send.

    Args:
        ranks: addresses of the trainer's ranks, each of which has one stripe.
    """
    order = sorted(ready, key=chain_place)
    with_base = [m for m in order if pending.deltas is not None and m.held == pending.base_version]
    without = [m for m in order if m not in with_base]
    dispatches = []
    for clients, base_version in ((with_base, pending.base_version), (without, None)):
        if not clients:
            continue
        ranges = pending.ranges(base_version)
        num_bytes = sum(end - start for start, end in ranges)
        num_workers = sum(len(client.workers) for client in clients)
        bucket = chain.bucket_bytes(bucket_bytes, num_bytes // max(len(ranges), 1), num_workers)
        num_slow = sum(client.standing.is_slow for client in clients)
        num_slow = 0 if num_slow == len(clients) else num_slow
        routes = chain.chain(
            [client.workers for client in clients],
            list(zip(ranges, ranks, strict=False)),
            num_reliable=sum(not client.is_suspect for client in clients[: len(clients) - num_slow]),
            slow=[client.standing.gives_slowly for client in clients[len(clients) - num_slow :]],
        )
        for client, route in zip(clients, routes, strict=True):
            dispatches.append(
                Dispatch(
                    client=client, route=route, num_bytes=num_bytes, bucket_bytes=bucket, base_version=base_version
                )
            )
    return dispatches


def joining(
    pending: PendingVersion,
    ready: Sequence[ServerClient],
    holders: Sequence[ServerClient],
    ranks: Sequence[Address],
    bucket_bytes: int,
) -> list[Dispatch]:
    """Plans separate pulls from the last servers that have the version or are pulling it.

    The end of a chain forwards nothing, so its uplink is free. A pull from the trainer would take half of its uplink
    from the chain.

    Args:
        holders: reliable servers that have the version or are pulling it.
    """
    origins = list(zip(pending.stripes, ranks, strict=False))
    asked = frozenset[Address]().union(*(pull.sources for pull in pending.pulls.values()))
    last_first = sorted(holders, key=chain_place, reverse=True)
    dispatches = []
    for client in ready:
        near = [one for one in last_first if _may_give(pending.pulls.get(one.name), client, asked)]
        near = [one for one in near if not one.standing.is_slow] or near
        route = chain.join(client.workers, [one.workers for one in near[: chain.BACKUPS]], origins)
        dispatches.append(
            Dispatch(
                client=client,
                route=route,
                num_bytes=pending.layout.num_bytes,
                bucket_bytes=bucket_bytes,
                is_chained=False,
            )
        )
    return dispatches


def _may_give(pull: Dispatch | None, client: ServerClient, asked: frozenset[Address]) -> bool:
    """Whether a server may be a source of one that joins.

    Two servers that wait for each other's bytes would wait for ever. So a server that others ask for bytes, which joins
    because its own pull failed, gets the version only from those that have it.

    Args:
        pull: the source's own update. None = it has the version.
        asked: workers that others ask for bytes.
    """
    return pull is None or (pull.base_version is None and asked.isdisjoint(client.workers))


def expected_s(num_bytes: int, outcomes: Iterable[UpdateOutcome]) -> float:
    """Returns the seconds that a healthy server would need for so many bytes, by its last updates. 0 = not known."""
    reports = [
        Report(server="", seconds=1e-3 * outcome.answer.transfer_ms / outcome.num_bytes, links=())
        for outcome in outcomes
        if outcome.answer is not None and outcome.num_bytes
    ]
    return num_bytes * healthy_s(reports)
