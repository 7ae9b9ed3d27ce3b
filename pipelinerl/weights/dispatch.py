"""Plans the update of each server to one version: payload and sources. Pure: changes neither offers nor members."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipelinerl.weights import chain
from pipelinerl.weights.member import Member, UpdateOutcome
from pipelinerl.weights.offer import Offer
from pipelinerl.weights.protocol import Address


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


def chained(offer: Offer, ready: Sequence[Member], ranks: Sequence[Address], bucket_bytes: int) -> list[Dispatch]:
    """Plans the chains of the servers that hold the delta's base, and those of all others. Reliable servers come first.

    Args:
        ranks: addresses of the trainer's ranks, each of which has one stripe.
    """
    order = sorted(ready, key=lambda member: (member.is_suspect, member.job.node_rank, member.job.replica_idx))
    with_base = [m for m in order if offer.deltas is not None and m.held == offer.base_version]
    without = [m for m in order if m not in with_base]
    dispatches = []
    for members, base_version in ((with_base, offer.base_version), (without, None)):
        if not members:
            continue
        ranges = offer.ranges(base_version)
        num_bytes = sum(end - start for start, end in ranges)
        num_workers = sum(len(member.workers) for member in members)
        bucket = chain.bucket_bytes(bucket_bytes, num_bytes // max(len(ranges), 1), num_workers)
        routes = chain.chain(
            [member.workers for member in members],
            list(zip(ranges, ranks, strict=False)),
            num_reliable=sum(not member.is_suspect for member in members),
        )
        for member, route in zip(members, routes, strict=True):
            dispatches.append(
                Dispatch(
                    member=member, route=route, num_bytes=num_bytes, bucket_bytes=bucket, base_version=base_version
                )
            )
    return dispatches


def joining(
    offer: Offer, ready: Sequence[Member], holders: Sequence[Member], ranks: Sequence[Address], bucket_bytes: int
) -> list[Dispatch]:
    """Plans separate pulls from the last servers that have the version, because the end of a chain forwards least."""
    origins = list(zip(offer.stripes, ranks, strict=False))
    near = [holder.workers for holder in reversed(holders[-chain.BACKUPS :])]
    return [
        Dispatch(
            member=member,
            route=chain.join(member.workers, near, origins),
            num_bytes=offer.layout.num_bytes,
            bucket_bytes=bucket_bytes,
        )
        for member in ready
    ]


def expected_s(num_bytes: int, outcomes: Iterable[UpdateOutcome]) -> float:
    """Estimates the seconds of a transfer from the last update of each server. Returns 0 if there was none."""
    rates = [outcome.num_bytes / outcome.seconds for outcome in outcomes if outcome.answer is not None]
    return num_bytes / statistics.median(rates) if rates else 0.0
