"""``python -m pipelinerl.plan weights``: predicted time of a weight update, by model, servers and sending ranks.

The network time of one update is pure arithmetic. The formulas are in docs/algorithms.md §11.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pipelinerl.weights.transfer.chain import bucket_bytes
from pipelinerl.weights.transfer.nccl import CHANNELS


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


CHANNEL_BYTES = 16e6
"""GPU memory of a channel of an NCCL communicator: 0.4 to 0.5 GB at 32 channels on A100 and H100, as published."""


def communicators(servers: int) -> int:
    """Returns the most NCCL communicators of a worker: with the trainer's ranks, to a server, from a server."""
    return 3 if servers > 1 else 1


MODELS = {"7B": 7e9, "32B": 32e9, "70B": 70e9, "405B": 405e9}
SERVERS = (8, 64, 512)
RANKS = (1, 8, 64)
BYTES_PER_PARAMETER = 2
BUCKET_BYTES = 8 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gbytes-per-s", type=float, default=50.0, help="GB/s of one link (400 Gbit/s: 50)")
    parser.add_argument("--links", type=int, default=8, help="links of a server's node")


def run_weights(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the seconds until the last server has received an update, without staging and swap."""
    wire = LinkSpeed(bytes_per_s=1e9 * args.gbytes_per_s, links_per_server=args.links)
    table = Table(title=f"seconds per update, {args.gbytes_per_s:g} GB/s per link, {args.links} links per server")
    for column in ("model", "servers", "star", *(f"chain, {ranks} rank(s)" for ranks in RANKS)):
        table.add_column(column, justify="right")
    rows = []
    for name, parameters in MODELS.items():
        num_bytes = int(parameters * BYTES_PER_PARAMETER)
        for servers in SERVERS:
            chains = {
                ranks: planned_s(num_bytes, servers, wire, largest_bucket=BUCKET_BYTES, stripes=ranks)
                for ranks in RANKS
            }
            star = star_s(num_bytes, servers, wire)
            rows.append({"model": name, "servers": servers, "star_s": star, "chain_s": chains})
            table.add_row(name, str(servers), f"{star:,.1f}", *(f"{seconds:,.2f}" for seconds in chains.values()))
    console.print(table)
    most = communicators(max(SERVERS))
    memory = most * CHANNELS * CHANNEL_BYTES
    console.print(
        f"With weights.backend=nccl: at most {most} communicators in a worker's GPU and 1 in a trainer rank's, of "
        f"{CHANNELS} channels each: about {memory / 1e9:.1f} GB (not measured)"
    )
    return {"rows": rows, "communicators": most, "communicator_bytes": memory}
