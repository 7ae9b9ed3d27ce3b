"""Estimates the network time of an update. Pure. The formulas are in docs/algorithms.md §11."""

from dataclasses import dataclass

from pipelinerl.weights.chain import bucket_bytes


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Network speed for an update."""

    bytes_per_s: float
    """Of one link of a trainer rank or a server."""
    hop_s: float = 0.002
    """Delay between a worker's last received byte of a bucket and its first sent byte of that bucket."""
    links_per_server: int = 1
    """Network cards that the workers of a server share."""


def chain_s(num_bytes: float, servers: int, wire: LinkSpeed, *, bucket: float, stripes: int = 1) -> float:
    """Returns the seconds until the last of ``servers`` has all bytes of one update.

    Args:
        bucket: bytes that a server collects before it forwards them.
        stripes: trainer ranks that each send a share over their own link.
    """
    rate = wire.bytes_per_s * min(stripes, wire.links_per_server if servers > 1 else stripes)
    hop_s = bucket / wire.bytes_per_s + wire.hop_s
    return num_bytes / rate + (servers - 1) * hop_s


def star_s(num_bytes: float, servers: int, wire: LinkSpeed) -> float:
    """Returns the seconds of an update if the trainer sends all bytes to every server itself."""
    return servers * num_bytes / wire.bytes_per_s


def planned_s(num_bytes: int, servers: int, wire: LinkSpeed, *, largest_bucket: int, stripes: int = 1) -> float:
    """Returns ``chain_s`` for the bucket size that the sender would choose."""
    bucket = bucket_bytes(largest_bucket, num_bytes // stripes, servers)
    return chain_s(num_bytes, servers, wire, bucket=bucket, stripes=stripes)
