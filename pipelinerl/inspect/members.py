"""Lists a run's members or asks a server to leave: `python -m pipelinerl.inspect.members ADDRESS [--leave NAME]`.

A lease is shown as held if it was renewed while the command watched. The command starts nothing, and only `--leave`
writes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelinerl.config.load import load_run
from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.errors import ConfigError, told_in_one_line
from pipelinerl.membership.address import address_of, open_store, parse_address
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import LeaseStore
from pipelinerl.world.placement import SERVER_KINDS

LOOK_AGAIN_S = 2.5
"""Seconds between two looks at the leases. Longer than a role waits between two renewals."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pipelinerl members", description="Who is in a run now.")
    parser.add_argument("run", help="the run's folder, or redis://HOST:PORT/RUN")
    parser.add_argument("--leave", metavar="NAME", help="ask this server to end what it does and leave the run")
    args = parser.parse_args(argv)
    store = store_of(args.run)
    if args.leave:
        ask_to_leave(store, args.leave)
        print(f"{args.leave} is asked to leave: it takes no new request and ends with its last one")
        return 0
    Console().print(table_of(*look_twice(store, time.sleep)))
    return 0


def store_of(run: str) -> LeaseStore:
    """Open the store with the leases of a run. `run` is its folder or its redis address."""
    address = parse_address(run)
    if not isinstance(address, Path):
        return open_store(address)
    if not (address / RUN_CONFIG).is_file():
        raise ConfigError(f"`{run}` is not a run folder: {RUN_CONFIG} is missing")
    return open_store(address_of(load_run(address), address))


def ask_to_leave(store: LeaseStore, name: str) -> None:
    leases = store.leases()
    if name not in leases:
        raise ConfigError(f"{name!r} has no lease in this run; those that have one are {sorted(leases)}")
    if leases[name].kind not in SERVER_KINDS:
        kinds = " and ".join(SERVER_KINDS)
        raise ConfigError(f"{name!r} is no server of a model: only {kinds} leave a run that goes on")
    store.ask_to_leave(name)


def look_twice(store: LeaseStore, sleep: Callable[[float], None]) -> tuple[dict[str, Lease], dict[str, Lease]]:
    before = store.leases()
    sleep(LOOK_AGAIN_S)
    return before, store.leases()


def table_of(before: dict[str, Lease], after: dict[str, Lease]) -> Table:
    """Return a table with one line per lease of `after`. `before` are the leases of the first look."""
    table = Table(header_style="bold")
    for column in ("member", "state", "lease", "serves", "rollouts", "weights", "address"):
        table.add_column(column)
    for name, lease in sorted(after.items()):
        is_renewed = name not in before or before[name].sequence != lease.sequence
        table.add_row(
            name,
            lease.state,
            "held" if is_renewed else f"not renewed for {LOOK_AGAIN_S:g} s",
            str(lease.serves) if lease.capacity else "",
            str(lease.capacity or ""),
            lease.version,
            escape(lease.url),
        )
    return table


if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
