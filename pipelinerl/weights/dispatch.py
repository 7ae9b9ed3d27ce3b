"""Plans the update of each server to one version: payload and sources. Pure: changes neither snapshots nor members."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl.weights import chain
from pipelinerl.weights.member import Member, UpdateOutcome
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """An update of one server."""

    member: Member
    route: chain.Route
    num_bytes: int
    """Length of the payload."""
    bucket_bytes: int
    base_version: int | None = None
    """The payload is the difference from this version. None = the whole version."""


def chained(snapshot: Snapshot, ready: Sequence[Member], origin: Address, bucket_bytes: int) -> list[Dispatch]:
    """Plans one chain of the servers that hold the delta's base and one of all others. Reliable servers come first."""
    order = sorted(ready, key=lambda member: (member.is_suspect, member.job.node_rank, member.job.replica_idx))
    with_base = [m for m in order if snapshot.delta is not None and m.held == snapshot.base_version]
    without = [m for m in order if m not in with_base]
    dispatches = []
    for members, base_version in ((with_base, snapshot.base_version), (without, None)):
        num_bytes = snapshot.payload(base_version).numel() if members else 0
        bucket = chain.bucket_bytes(bucket_bytes, num_bytes, sum(len(member.workers) for member in members))
        routes = chain.chain([member.workers for member in members], [((0, num_bytes), origin)])
        for member, route in zip(members, routes, strict=True):
            dispatches.append(
                Dispatch(
                    member=member, route=route, num_bytes=num_bytes, bucket_bytes=bucket, base_version=base_version
                )
            )
    return dispatches


def joining(
    snapshot: Snapshot, ready: Sequence[Member], holders: Sequence[Member], origin: Address, bucket_bytes: int
) -> list[Dispatch]:
    """Plans separate pulls from the last servers that have the version, because the end of a chain forwards least."""
    num_bytes = snapshot.layout.num_bytes
    near = [holder.workers for holder in reversed(holders[-chain.BACKUPS :])]
    return [
        Dispatch(
            member=member,
            route=chain.join(member.workers, near, [((0, num_bytes), origin)]),
            num_bytes=num_bytes,
            bucket_bytes=bucket_bytes,
        )
        for member in ready
    ]


def expected_s(num_bytes: int, outcomes: Iterable[UpdateOutcome]) -> float:
    """Estimates the seconds of a transfer from the last update of each server. Returns 0 if there was none."""
    rates = [outcome.num_bytes / outcome.seconds for outcome in outcomes if outcome.answer is not None]
    return num_bytes / statistics.median(rates) if rates else 0.0
