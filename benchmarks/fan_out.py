"""What an update costs for 1 to 32 servers: bytes on every link, and time where the links are the limit.

    python -m benchmarks.fan_out --json benchmarks/fan_out.json

*Chain* is the project's sender. *Star* is the same sender whose servers all pull from the trainer. Receivers are
processes without a model. For the times every process's uplink is limited by a token bucket to a rate at which the CPU
is no bottleneck. The prediction is that of docs/algorithms.md §11; its latency per hop comes from the first two rows.
*Stripes* are several trainer ranks that each send a share over an uplink of their own, to servers with as many links.
"""

import argparse
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.provenance import machine
from benchmarks.receivers import SECRET, ReceiverProcess, Uplink, forkserver, receivers
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish import delivery
from pipelinerl.weights.publish.dispatch import Dispatch, late
from pipelinerl.weights.publish.links import LinkTable
from pipelinerl.weights.publish.origin import Origin
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.weights.publish.versions import PendingVersion
from pipelinerl.weights.transfer.chain import bucket_bytes
from tests.sender_kit import sender_settings

MIB = 1 << 20
TIMEOUT_S = 600.0


def star(
    pending: PendingVersion, ready: Sequence[ServerClient], links: LinkTable, ranks: Sequence[Address], bucket: int
) -> list[Dispatch]:
    """Every server pulls from the trainer."""
    return late(pending, ready, [], links, ranks, bucket, is_overdue=True)


def push(
    running: list[ReceiverProcess], num_bytes: int, rate: float, *, is_star: bool = False, versions: int, ranks: int = 1
) -> dict[str, Any]:
    """Bytes on each link and seconds of the last of some updates."""
    weights = {"w": torch.zeros(num_bytes, dtype=torch.uint8)}
    specs = [spec_of(*item) for item in weights.items()]
    settings = sender_settings(secret=SECRET, timeout_s=TIMEOUT_S, stall_s=60.0)
    name = uuid.uuid4().hex  # receivers still have the bytes of the push before
    origins = [Origin(settings, sender=name, rank=rank, ranks=ranks) for rank in range(ranks)]
    for origin in origins:
        origin.source_server._pace = Uplink(rate)
    others = [origin.address for origin in origins[1:]]
    chained = star if is_star else delivery.chained
    with mock.patch.object(delivery, "chained", chained):
        sender = WeightSender(lambda: [one.job for one in running], settings, lambda message: None, origins[0], others)
        try:
            assert sender.wait_for_servers(len(running), 60) == len(running)
            for version in range(versions):
                before, given = sum(o.source_server.num_bytes for o in origins), [one.ask()[0] for one in running]
                weights["w"].fill_(version)
                started = time.monotonic()
                plan = sender.plan()
                sender.send(version, weights.items(), specs, plan=plan)
                for origin in origins[1:]:
                    origin.take_snapshot(version, weights.items(), specs, plan)
                assert sender.wait_live(version, TIMEOUT_S, count=len(running)), sender.outcomes
                seconds = time.monotonic() - started
            out = sum(origin.source_server.num_bytes for origin in origins) - before
            forwarded = [one.ask()[0] - base for one, base in zip(running, given, strict=True)]
        finally:
            sender.close()
            for origin in origins:
                origin.close()
    return {"seconds": round(seconds, 3), "bytes_out": out, "forwarded_max": max(forwarded)}


def bytes_row(count: int, num_bytes: int) -> dict[str, Any]:
    with receivers(count) as running:
        chain = push(running, num_bytes, 0, versions=2)
        beside = push(running, num_bytes, 0, is_star=True, versions=2)
    return {
        "servers": count,
        "out_per_model": chain["bytes_out"] / num_bytes,
        "forwarded_per_model_max": chain["forwarded_max"] / num_bytes,
        "star_out_per_model": beside["bytes_out"] / num_bytes,
        "unlimited_s": chain["seconds"],
        "star_unlimited_s": beside["seconds"],
    }


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """Network speed for an update."""

    bytes_per_s: float
    """Of one link of a trainer rank or a server."""
    hop_s: float
    """Delay between a worker's last received byte of a bucket and its first sent byte of that bucket."""
    links_per_server: int = 1
    """Network cards that the workers of a server share."""


def chain_s(num_bytes: float, servers: int, wire: LinkSpeed, *, bucket: float, stripes: int = 1) -> float:
    """Returns the seconds until the last of ``servers`` has all bytes of one update (docs/algorithms.md §11).

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


def time_row(count: int, num_bytes: int, rate: float, *, with_star: bool) -> dict[str, Any]:
    with receivers(count, rate=rate) as running:
        row = {"servers": count, "chain_s": push(running, num_bytes, rate, versions=2)["seconds"]}
        if with_star:
            row["star_s"] = push(running, num_bytes, rate, is_star=True, versions=1)["seconds"]
    return row


def striped_row(count: int, num_bytes: int, rate: float, ranks: int, hop_s: float) -> dict[str, Any]:
    """One rank and several. A server's uplink has ``rate``, which is that of all ranks together."""
    with receivers(count, rate=rate) as running:
        one = push(running, num_bytes, rate / ranks, versions=1)["seconds"]
        striped = push(running, num_bytes, rate / ranks, versions=1, ranks=ranks)
    wire = LinkSpeed(bytes_per_s=rate / ranks, hop_s=hop_s, links_per_server=ranks)
    bucket = bucket_bytes(MIB, num_bytes // ranks, count)
    predicted = chain_s(num_bytes, count, wire, bucket=bucket, stripes=ranks)
    return {
        "servers": count,
        "ranks": ranks,
        "one_rank_s": one,
        "ranks_s": striped["seconds"],
        "times_faster": round(one / striped["seconds"], 2),
        "predicted_s": round(predicted, 3),
        "measured_over_predicted": round(striped["seconds"] / predicted, 3),
        "out_per_model": striped["bytes_out"] / num_bytes,
    }


def predict(rows: list[dict[str, Any]], num_bytes: int, rate: float) -> float:
    """Add the model's times. Returns the latency per hop, which comes from the difference of the first two rows."""
    first, second = rows[0], rows[1]
    bucket = bucket_bytes(MIB, num_bytes, second["servers"])
    hops = second["servers"] - first["servers"]
    hop_s = max((second["chain_s"] - first["chain_s"]) / hops - bucket / rate, 0.0)
    wire = LinkSpeed(bytes_per_s=rate, hop_s=hop_s)
    for row in rows:
        bucket = bucket_bytes(MIB, num_bytes, row["servers"])
        row["predicted_s"] = round(chain_s(num_bytes, row["servers"], wire, bucket=bucket), 3)
        row["measured_over_predicted"] = round(row["chain_s"] / row["predicted_s"], 3)
        if "star_s" in row:
            row["star_predicted_s"] = round(star_s(num_bytes, row["servers"], wire), 3)
    return hop_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--timed", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--ranks", type=int, default=4, help="trainer ranks that send a stripe each")
    parser.add_argument("--striped", type=int, default=8, help="servers that get them")
    parser.add_argument("--mb", type=int, default=64, help="size of the model where times are measured")
    parser.add_argument("--rate-mb", type=float, default=8, help="MB/s of every link where times are measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with forkserver():
        measure(args)


def measure(args: argparse.Namespace) -> None:
    rows = []
    for count in args.servers:
        rows.append(bytes_row(count, 16 * MIB))
        print(rows[-1], flush=True)
    num_bytes, rate = args.mb * MIB, args.rate_mb * MIB
    timed = [time_row(count, num_bytes, rate, with_star=count == max(args.timed)) for count in args.timed]
    hop_s = predict(timed, num_bytes, rate)
    for row in timed:
        row["over_one"] = round(row["chain_s"] / timed[0]["chain_s"], 3)
        if "star_s" in row:
            row["star_over_one"] = round(row["star_s"] / timed[0]["chain_s"], 3)
        print(row, flush=True)
    striped = striped_row(args.striped, num_bytes, rate, args.ranks, hop_s)
    print(striped, flush=True)
    if args.json:
        document = {"machine": machine(), "cores": os.cpu_count()}
        document |= {"model_mb": args.mb, "rate_mb_per_s": args.rate_mb, "bytes": rows, "times": timed}
        document |= {"stripes": striped}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
