"""What one or two slow servers cost the others: seconds of each update until every healthy server has it.

    python -m benchmarks.slow_server --json benchmarks/slow_server.json

Servers are processes without a model on loopback. Every uplink is limited to the same rate, and the slow ones' uplink,
downlink or both to a share of it. Each case makes the same updates with new senders: without slow servers, with them,
and without them again, because other processes of the machine come and go. The bar is that from the fourth update on
(with two slow servers the sixth) no healthy server takes more than 1.5 times the median without slow ones, that none of
them leaves service, and that a slow one is served or named. A case over the bar is made again. Every row says the load,
and all are kept.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.provenance import commit, machine
from benchmarks.receivers import SECRET, ReceiverProcess, Uplink, forkserver, receivers
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.delivery import Pushing
from pipelinerl.weights.publish.origin import Origin
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.publish.servers import ServerClient
from tests.sender_kit import sender_settings

MIB = 1 << 20
BAR, LEARNED = 1.5, {1: 3, 2: 5}
"""The bar holds after so many updates, by the number of slow servers: faults that mask each other show one by one."""
WAIT_S = 900.0


@dataclass(frozen=True)
class Case:
    """Servers, and which of them are slow in what."""

    servers: int
    mb: int
    slow: dict[int, tuple[str, float]]
    """Place → (``uplink``, ``downlink`` or ``both``, share of the rate)."""

    def __str__(self) -> str:
        slow = ", ".join(f"{place}: {kind} 1/{1 / share:g}" for place, (kind, share) in self.slow.items())
        return f"{self.servers} servers, {self.mb} MB, {slow or 'none slow'}"


def cases(servers: int) -> list[Case]:
    """One and two slow servers, at the first, a middle and the last place, in what they give and in what they take."""
    middle, last = servers // 2, servers - 1
    slow = [
        {0: ("uplink", 1 / 10)},
        {0: ("downlink", 1 / 4)},
        {middle: ("uplink", 1 / 30)},
        {middle: ("downlink", 1 / 10)},
        {last: ("uplink", 1 / 4)},
        {last: ("downlink", 1 / 30)},
        {0: ("uplink", 1 / 4), middle: ("downlink", 1 / 10)},
        {0: ("downlink", 1 / 30), last: ("uplink", 1 / 10)},
        {middle - 1: ("both", 1 / 10), middle: ("both", 1 / 4)},
    ]
    large = [{0: ("uplink", 1 / 4)}, {0: ("uplink", 1 / 30), middle: ("downlink", 1 / 10)}]
    return [*(Case(servers, 16, one) for one in slow), *(Case(servers, 48, one) for one in large)]


def drawn_cases(servers: int, count: int, seed: int) -> list[Case]:
    """One or two slow servers at drawn places, of drawn kinds, shares and sizes."""
    drawn, made = random.Random(f"{seed} {servers}"), []
    for _ in range(count):
        places = drawn.sample(range(servers), drawn.choice([1, 2]))
        slow = {place: (drawn.choice(["uplink", "downlink", "both"]), 1 / drawn.randint(4, 30)) for place in places}
        made.append(Case(servers, drawn.choice([16, 24, 48]), slow))
    return made


@contextmanager
def slowed(running: Sequence[ReceiverProcess], case: Case, rate: float) -> Iterator[None]:
    """The slow servers of a case, which are as fast as the others afterwards."""
    for place, (kind, share) in case.slow.items():
        running[place].ask("rate", rate * share if kind != "downlink" else rate)
        running[place].ask("downlink", rate * share if kind != "uplink" else 0.0)
    try:
        yield
    finally:
        for place in case.slow:
            running[place].ask("rate", rate)
            running[place].ask("downlink", 0.0)


def push_all(
    running: Sequence[ReceiverProcess],
    case: Case,
    rate: float,
    updates: int,
    timeout_s: float,
    pause_s: float = math.inf,
) -> list[dict]:
    """Makes the updates with a new sender. Returns a row for each.

    Args:
        pause_s: the next update waits for slow servers no longer than this after the healthy ones have the last.
    """
    weights = {"w": torch.zeros(case.mb * MIB, dtype=torch.uint8)}
    specs = [spec_of(*item) for item in weights.items()]
    settings = sender_settings(secret=SECRET, timeout_s=timeout_s)
    origin = Origin(settings, sender=uuid.uuid4().hex)
    origin.source_server._pace = Uplink(rate)
    names = [one.job.name for one in running]
    healthy = {name for place, name in enumerate(names) if place not in case.slow}
    rows = []
    with closing(WeightSender(lambda: [one.job for one in running], settings, lambda message: None, origin)) as sender:
        assert sender.wait_for_servers(len(running), 60) == len(running)
        for version in range(updates):
            weights["w"].fill_(version)
            lost_before = set(lost(sender))
            started = time.monotonic()
            sender.send(version, weights.items(), specs)
            wait_until(lambda version=version: healthy <= serving(sender, version), f"update {version} of {case}")
            seconds = time.monotonic() - started
            paused_at = time.monotonic() + pause_s
            wait_until(
                lambda end=paused_at: not sender.is_busy or time.monotonic() > end,
                f"the end of update {version} of {case}",
            )
            rows.append(
                {
                    "seconds": round(seconds, 3),
                    "expelled": sorted((set(lost(sender)) - lost_before) & healthy),
                    "slow_to_give_or_take": slow_marks(sender),
                }
            )
        slow = set(names) - healthy
        deadline = time.monotonic() + 3 * timeout_s
        while not slow <= set(slow_marks(sender)) | serving(sender, updates - 1) and time.monotonic() < deadline:
            time.sleep(0.05)  # a slow server may still pull one of the versions
        rows[-1] |= {
            "slow_to_give_or_take": slow_marks(sender),
            "all_slow_are_known": slow <= set(slow_marks(sender)),
            "slow_serve": {one.name: one.serves for one in sender._pool if one.name in slow},
        }
    return rows


def slow_marks(sender: WeightSender) -> dict[str, list[bool]]:
    """Servers that are known to be slow: [to give, to take]."""
    links = cast(Pushing, sender._delivery).links
    return {name: [name in links.slow_uplinks, name in links.slow_downlinks] for name in sorted(links.slow)}


def serving(sender: WeightSender, version: int) -> set[str]:
    return {client.name for client in sender._pool if client.serves == version}


def lost(sender: WeightSender) -> Iterator[str]:
    """Servers whose last update failed, and not through a fault of others."""
    clients: Iterator[ServerClient] = iter(sender._pool)
    outcomes = ((client.name, client.last) for client in clients)
    return (name for name, last in outcomes if last is not None and last.error and not last.is_held_up)


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {WAIT_S:g} s"
        time.sleep(0.005)


def healthy_seconds(running: Sequence[ReceiverProcess], case: Case, rate: float, timeout_s: float) -> list[float]:
    """Seconds of the updates without slow servers, but for the first one."""
    return [row["seconds"] for row in push_all(running, Case(case.servers, case.mb, {}), rate, 4, timeout_s)[1:]]


def row_of(case: Case, running: Sequence[ReceiverProcess], rate: float, updates: int, timeout_s: float) -> dict:
    load = os.getloadavg()[0]
    before_s = healthy_seconds(running, case, rate, timeout_s)
    with slowed(running, case, rate):
        rows = push_all(running, case, rate, updates, timeout_s, pause_s=2 * statistics.median(before_s))
    none_slow_s = [*before_s, *healthy_seconds(running, case, rate, timeout_s)]
    later = [row["seconds"] / statistics.median(none_slow_s) for row in rows[LEARNED[len(case.slow)] :]]
    expelled = sorted({name for row in rows for name in row["expelled"]})
    return {
        "case": str(case),
        "without_s": none_slow_s,
        "seconds": [row["seconds"] for row in rows],
        "later_over_without_max": round(max(later), 3),
        "later_over_without_median": round(statistics.median(later), 3),
        "healthy_expelled": expelled,
        "slow_to_give_or_take": rows[-1]["slow_to_give_or_take"],
        "all_slow_are_known": rows[-1]["all_slow_are_known"],
        "slow_serve": rows[-1]["slow_serve"],
        "passed": max(later) <= BAR and not expelled,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--servers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--mb", type=int, nargs="+", default=[16, 48], help="sizes of the cases that are always made")
    parser.add_argument("--drawn", type=int, default=2, help="drawn cases for each number of servers")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--tries", type=int, default=3, help="so often is a case over the bar made")
    parser.add_argument("--rate-mb", type=float, default=8, help="MB/s of every healthy link")
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--timeout-s", type=float, default=60, help="`weights.timeout_s`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rate, rows = args.rate_mb * MIB, list[dict]()
    document: dict[str, Any] = {
        "machine": machine(),
        "cores": os.cpu_count(),
        "commit": commit(),
    }
    document |= {"rate_mb_per_s": args.rate_mb, "timeout_s": args.timeout_s, "seed": args.seed}
    document |= {"bar": BAR, "rows": rows}
    with forkserver():
        for servers in args.servers:
            with receivers(servers, rate=rate) as running:
                fixed = [case for case in cases(servers) if case.mb in args.mb]
                made = [*drawn_cases(servers, args.drawn, args.seed), *fixed]
                for case in (case for case in made if args.only in str(case)):
                    for _ in range(args.tries):
                        rows.append(row_of(case, running, rate, args.updates, args.timeout_s))
                        print(rows[-1], flush=True)
                        if args.json:
                            args.json.write_text(json.dumps(document, indent=2) + "\n")
                        if rows[-1]["passed"]:
                            break


if __name__ == "__main__":
    main()
