"""What an update costs on the wire. Pure; formulas in docs/algorithms.md §11."""

from dataclasses import dataclass

from pipelinerl.weights.chain import bucket_bytes


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """The network as an update sees it."""

    bytes_per_s: float
    """Of one link: a trainer rank's, a server's."""
    hop_s: float = 0.002
    """From a bucket's last byte in a worker to its first byte on the way to the next."""
    links_per_server: int = 1
    """Network cards of a server's node that its workers share."""


def chain_s(num_bytes: float, servers: int, wire: LinkSpeed, *, bucket: float, stripes: int = 1) -> float:
    """Seconds until the last of ``servers`` has all bytes of one update.

    Args:
        bucket: bytes that a server waits for before it passes them on.
        stripes: trainer ranks that send a share each, over a link of their own.
    """
    rate = wire.bytes_per_s * min(stripes, wire.links_per_server if servers > 1 else stripes)
    hop_s = bucket / wire.bytes_per_s + wire.hop_s
    return num_bytes / rate + (servers - 1) * hop_s


def star_s(num_bytes: float, servers: int, wire: LinkSpeed) -> float:
    """Seconds if the trainer sends the whole to every server itself."""
    return servers * num_bytes / wire.bytes_per_s


def planned_s(num_bytes: int, servers: int, wire: LinkSpeed, *, largest_bucket: int, stripes: int = 1) -> float:
    """``chain_s`` with the bucket that the sender would choose."""
    bucket = bucket_bytes(largest_bucket, num_bytes, servers)
    return chain_s(num_bytes, servers, wire, bucket=bucket, stripes=stripes)
