"""``python -m pipelinerl.plan weights``: predicted time and pause of a weight update, by model, servers, sending ranks.

Both are pure arithmetic. The formulas are in docs/algorithms.md §11.
"""

import argparse
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from pipelinerl.weights.staging_memory import CHANNELS, COMMUNICATOR_BYTES, COMMUNICATORS
from pipelinerl.weights.transfer.chain import bucket_bytes


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


@dataclass(frozen=True, kw_only=True)
class SwapSpeed:
    """Speed of the copies in the pause."""

    bytes_per_s: float
    """At which staged bytes are read and written where the model is."""
    copy_s: float = 8e-6
    """Host time of one copy, which the device does not wait for once it has others."""


def pause_s(num_bytes: float, tensors: int, speed: SwapSpeed) -> float:
    """Returns the seconds in which decoding stands still for the swap, after the step under way.

    Args:
        num_bytes: what one worker stages.
        tensors: copies that it makes, about one for each tensor sent.
    """
    return max(num_bytes / speed.bytes_per_s, tensors * speed.copy_s)


def planned_s(num_bytes: int, servers: int, wire: LinkSpeed, *, largest_bucket: int, stripes: int = 1) -> float:
    """Returns ``chain_s`` for the bucket size that the sender would choose."""
    bucket = bucket_bytes(largest_bucket, num_bytes // stripes, servers)
    return chain_s(num_bytes, servers, wire, bucket=bucket, stripes=stripes)


def communicators(servers: int) -> int:
    """Returns the most NCCL communicators of a worker: with the trainer's ranks, to a server, from a server."""
    return COMMUNICATORS if servers > 1 else 1


class Model(NamedTuple):
    parameters: float
    tensors: int
    """In its checkpoint."""
    workers: int
    """GPUs of one server."""


MODELS = {
    "7B": Model(7.6e9, 339, 1),
    "32B": Model(32.8e9, 771, 4),
    "70B": Model(70.6e9, 723, 8),
    "405B": Model(406e9, 1137, 16),
    "30B-A3B": Model(30.5e9, 18_867, 2),
    "235B-A22B": Model(235e9, 36_945, 8),
}
"""Qwen2.5, Llama 3.1 and Qwen3."""
SERVERS = (8, 64, 512)
RANKS = (1, 8, 64)
PLACES = ("pause, on GPU", "pause, in host")
BYTES_PER_PARAMETER = 2
BUCKET_BYTES = 8 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gbytes-per-s", type=float, default=50.0, help="GB/s of one link (400 Gbit/s: 50)")
    parser.add_argument("--links", type=int, default=8, help="links of a server's node")
    parser.add_argument("--memory-gbytes-per-s", type=float, default=1300.0, help="copies within a GPU (H100: 1,300)")
    parser.add_argument("--host-gbytes-per-s", type=float, default=50.0, help="from host memory to a GPU (PCIe 5: 50)")


def run_weights(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print and return the seconds until the last server has received an update, and those of the pause that follows.

    The pause: an update staged on the GPU, and one in page-locked host memory.
    """
    wire = LinkSpeed(bytes_per_s=1e9 * args.gbytes_per_s, links_per_server=args.links)
    table = Table(title=f"seconds per update, {args.gbytes_per_s:g} GB/s per link, {args.links} links per server")
    for column in ("model", "servers", "star", *(f"chain, {ranks} rank(s)" for ranks in RANKS), *PLACES):
        table.add_column(column, justify="right")
    rates = dict(zip(PLACES, (args.memory_gbytes_per_s, args.host_gbytes_per_s), strict=True))
    rows = []
    for name, model in MODELS.items():
        num_bytes = int(model.parameters * BYTES_PER_PARAMETER)
        pauses = {
            place: pause_s(num_bytes / model.workers, model.tensors, SwapSpeed(bytes_per_s=1e9 * rate))
            for place, rate in rates.items()
        }
        for servers in SERVERS:
            chains = {
                ranks: planned_s(num_bytes, servers, wire, largest_bucket=BUCKET_BYTES, stripes=ranks)
                for ranks in RANKS
            }
            star = star_s(num_bytes, servers, wire)
            row = {"model": name, "servers": servers, "workers": model.workers, "star_s": star, "chain_s": chains}
            rows.append(row | {"pause_s": pauses})
            cells = (f"{seconds:,.2f}" for seconds in (*chains.values(), *pauses.values()))
            table.add_row(f"{name} × {model.workers}", str(servers), f"{star:,.1f}", *cells)
    console.print(table)
    most = communicators(max(SERVERS))
    memory = most * COMMUNICATOR_BYTES
    console.print(
        f"With weights.backend=nccl: at most {most} communicators in a worker's GPU and 1 in a trainer rank's, of "
        f"{CHANNELS} channels each: about {memory / 1e9:.1f} GB (not measured)"
    )
    return {"rows": rows, "communicators": most, "communicator_bytes": memory}
