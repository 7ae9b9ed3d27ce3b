"""One screen about a run: `python -m pipelinerl.status results/x [--watch] [--stacks] [--ledger] [--leave SERVER]`.

Reads only the run folder, or redis where a run keeps its streams there. `--stacks` also asks every live role of this
machine for its Python stacks. Only `--leave` writes.
"""

import argparse
import contextlib
import fcntl
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelinerl.config.environment import ROLE_VARIABLE
from pipelinerl.config.load import load_old_run, load_run
from pipelinerl.config.paths import LOCK_FILE, RUN_CONFIG
from pipelinerl.errors import ConfigError, PipelineRLError, visible
from pipelinerl.inspect import ledger
from pipelinerl.inspect.balance import balance_figures, balance_line
from pipelinerl.inspect.debug_run import read_debug_run
from pipelinerl.inspect.drops import HEADER, drops_table, read_drops
from pipelinerl.inspect.progress import blocked_loop_lines, first_answers
from pipelinerl.inspect.reading import look_into, process_environment
from pipelinerl.inspect.report import (
    imitates_alone,
    last_per_step,
    number,
    read_metrics_tail,
    read_records,
    read_summary,
    shared_share,
)
from pipelinerl.membership.address import address_of, open_store, parse_address
from pipelinerl.membership.stores import LeaseStore
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.observability.health import wait_chain
from pipelinerl.observability.status import BLOCKED_AT, HEARTBEAT_S, StatusRecord, read_statuses
from pipelinerl.records.messages import TrainingDone, WeightUpdateSuccess
from pipelinerl.streams import get_streams_backend
from pipelinerl.world.placement import SERVER_KINDS

STACKS_GRACE_S = 0.7
"""Time for faulthandler to write the stacks of all threads."""
STALE_HEARTBEAT_S = 5 * HEARTBEAT_S
"""A role beats also while it waits, but a loaded machine may delay it."""
WATCH_S = 1.0
"""Roles write their status at most twice a second."""
WATCH_REPEAT_S = 30.0
"""Seconds between two screens if the screen cannot be redrawn."""


def is_running(run_dir: Path) -> bool:
    """Whether a launcher, or the reaper that cleans up after one, holds the lock of the run folder."""
    try:
        with open(run_dir / LOCK_FILE, encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def run_state(run_dir: Path, last_step: int, step: int, statuses: Mapping[str, StatusRecord]) -> str:
    """Describe the state of the run in one line. ``last_step`` is `finetune.max_train_steps`, ``step`` the newest."""
    if is_running(run_dir):
        return f"running, step {step} of {last_step}"
    if figures := read_debug_run(run_dir):
        return f"finished, debug.mode={figures['mode']}"
    summary = read_summary(run_dir)
    if summary is not None and summary["optimizer_steps"] >= last_step:
        return f"finished, {summary['optimizer_steps']} steps"
    failed = [name for name, status in statuses.items() if status.state == "failed"]
    what = f"failed ({', '.join(failed)})" if failed else "stopped"
    return f"{what} at step {step} of {last_step}; the command that started it resumes it"


def as_ended(statuses: Mapping[str, StatusRecord]) -> dict[str, StatusRecord]:
    """Return the statuses of roles of an ended run as stopped, because a role that is stopped does not write it."""
    return {
        name: replace(status, state="stopped", waits=()) if status.state in ("running", "done") else status
        for name, status in statuses.items()
    }


def role_rows(statuses: Mapping[str, StatusRecord], now: float) -> list[tuple[str, ...]]:
    """Return one row per role: name, state, last progress, what it waits for, newest fields."""
    rows: list[tuple[str, ...]] = []
    for name, status in sorted(statuses.items()):
        state = describe_state(status, now)
        rows.append((name, state, f"{ago(now - status.progress_at)} ago", describe_wait(status, now), fields(status)))
    return rows


def describe_state(status: StatusRecord, now: float) -> str:
    if status.state != "running":
        return status.state
    silence = now - status.heartbeat
    if silence > STALE_HEARTBEAT_S:
        return f"silent for {ago(silence)}"
    if not status.progress_count:
        return "starting"
    return "waiting" if status.waits else "working"


def describe_wait(status: StatusRecord, now: float) -> str:
    if status.state != "running" or not status.waits:
        return ""
    oldest = status.waits[0]
    on = f" on {oldest.on}" if oldest.on else ""
    return f"{oldest.what}{on}, {ago(now - oldest.since)}"


def fields(status: StatusRecord) -> str:
    return " ".join(f"{name}={value}" for name, value in status.fields.items() if name != BLOCKED_AT)


def chains(statuses: Mapping[str, StatusRecord]) -> list[str]:
    """`actor_0 → finetune_0 → preprocessor_0` for every role that waits for another."""
    running = {name: status for name, status in statuses.items() if status.state == "running"}
    found = [wait_chain(name, running) for name in sorted(running)]
    longest = [chain for chain in found if len(chain) > 1]
    return [" → ".join(chain) for chain in longest if not any(chain == other[1:] for other in longest)]


def ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(seconds, 0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def progress_lines(records: Any) -> list[str]:
    steps = last_per_step(records.trainer)
    updates = [message for message in records.trainer if isinstance(message, WeightUpdateSuccess)]
    lines = []
    if steps:
        metrics = steps[-1].metrics
        lag = f"{number(metrics.get(TrainerMetric.LAG_MEAN), 1)} (max {number(metrics.get(TrainerMetric.LAG_MAX), 0)})"
        told = f"rollouts, lag {lag}"
        if imitates_alone(steps[-1]):
            told = f"conversations, loss {number(metrics.get(TrainerMetric.SFT_LOSS), 3)} nats per token"
        shared = shared_share(steps[-1:])
        told += f", {shared:.0%} of the tokens from common prefixes" if shared else ""
        lines.append(f"trained   step {steps[-1].step}, {steps[-1].samples_processed} {told}")
    if updates:
        servers = ", ".join(updates[-1].servers) or "no server"
        lines.append(f"weights   version {updates[-1].version} on {servers}")
    if records.evaluations:
        newest = records.evaluations[-1]
        success, reward = number(newest.success, 3), number(newest.reward, 2)
        lines.append(f"evaluated version {newest.version}: success {success}, reward {reward}")
    if any(isinstance(message, TrainingDone) for message in records.trainer):
        lines.append("training is done")
    return lines


def queue_lines(run_dir: Path, *, is_over: bool) -> list[str]:
    """Return a table of the records of each stream, and how far its readers are behind while the run goes on."""
    backend = get_streams_backend()
    rows = []
    for spec in backend.specs(run_dir):
        stats = backend.stats(spec)
        behind = {reader: stats.next_offset - position for reader, position in sorted(stats.positions.items())}
        unread = ", ".join(f"{reader} {count} behind" for reader, count in behind.items())
        rows.append((str(spec), str(stats.next_offset), "" if is_over else unread))
    return table(("stream", "records", "readers"), rows)


def member_lines(store: LeaseStore) -> list[str]:
    """Return a table of the leases: which roles take part, where they listen, which weights they have."""
    rows = [
        (
            name,
            lease.state,
            str(lease.capacity or ""),
            str(lease.serves) if lease.capacity else "",
            lease.version,
            lease.url,
        )
        for name, lease in sorted(store.leases().items())
    ]
    return ["", *table(("member", "lease", "rollouts", "serves", "weights", "address"), rows)] if rows else []


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


def dump_stacks(run_dir: Path, statuses: Mapping[str, StatusRecord]) -> list[str]:
    """Ask every live role of this machine for its stacks and return the stacks as lines."""
    asked = []
    for name, status in sorted(statuses.items()):
        if status.state == "running" and status.hostname == socket.gethostname() and is_role(status.pid, name, run_dir):
            job, _, rank = name.partition(".")
            path = run_dir / job / (f"stacks.{rank}.txt" if rank else "stacks.txt")
            asked.append((name, path, path.stat().st_size if path.exists() else 0))
            os.kill(status.pid, signal.SIGUSR1)
    time.sleep(STACKS_GRACE_S)
    lines = []
    for name, path, before in asked:
        text = path.read_bytes()[before:].decode(errors="replace") if path.exists() else ""
        lines += [
            f"── {name} ({path})",
            visible(text.rstrip()) or "no answer: the process is frozen or in foreign code",
        ]
    return lines


def is_role(pid: int, name: str, run_dir: Path) -> bool:
    """Whether this process is that role. The signal for stacks would end any other process."""
    job = name.partition(".")[0]
    if process_environment(pid).get(ROLE_VARIABLE, "").endswith(f"/{job}"):
        return True
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return str(run_dir) in arguments and job in arguments


def screen(run_dir: Path) -> list[str]:
    """Return the lines of the screen, without stacks."""
    cfg = load_old_run(run_dir)
    statuses = read_statuses(run_dir)
    state = run_state(run_dir, cfg.finetune.max_train_steps, 0, statuses)
    is_finished, members = state.startswith("finished"), list[str]()
    step = max((int(status.fields.get("step") or 0) for status in statuses.values()), default=0)
    try:
        with look_into(run_dir):
            records = read_records(run_dir, replicas=cfg.world.replicas, with_rollouts=False)
            step = max([step, *(message.step for message in last_per_step(records.trainer)[-1:])])
            streams = ["", *progress_lines(records), "", *queue_lines(run_dir, is_over=is_finished)]
            members = member_lines(open_store(address_of(cfg, run_dir))) if state.startswith("running") else []
    except PipelineRLError as error:
        streams = ["", f"the streams cannot be read: {error}"]
    state = run_state(run_dir, cfg.finetune.max_train_steps, step, statuses)
    if state.startswith("stopped"):
        statuses = as_ended(statuses)
    metrics = read_metrics_tail(run_dir, "actor") or {}
    generating = ["  ".join(first_answers(metrics, statuses))]
    lines = [
        f"run {run_dir}: {state}",
        *(generating if state.startswith("running") and not step else []),
        *table(("role", "state", "progress", "waits for", ""), role_rows(statuses, time.time())),
        *(f"wait chain: {chain}" for chain in chains(statuses)),
        *streams,
        *members,
        *blocked_loop_lines(metrics, statuses),
    ]
    if drops := drops_table(read_drops(run_dir, cfg.world.replicas)):
        lines += ["", *table(HEADER, drops)]
    if (balance := balance_figures(run_dir, cfg)) is not None:
        lines.append(f"balance   {balance_line(balance)}")
    hangs = sorted((run_dir / "hangs").glob("*")) if (run_dir / "hangs").is_dir() else []
    return [visible(line) for line in (*lines, *(f"hang report: {path}" for path in hangs))]


def watch(run_dir: Path) -> None:
    """Show the screen until the run ends. It is redrawn on a terminal, and printed every 30 s elsewhere."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, running = Console(), True
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while running:
            running = is_running(run_dir)  # asked before the screen is made, so that the last screen shows the end
            text = "\n".join(screen(run_dir))
            if live is None:
                print(text, flush=True)
            else:
                live.update(Text(text), refresh=True)
            until = time.monotonic() + (WATCH_REPEAT_S if live is None else WATCH_S)
            while running and time.monotonic() < until and is_running(run_dir):
                time.sleep(WATCH_S / 4)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines of text with columns as wide as their widest cell."""
    everything = [header, *rows]
    widths = [max(len(row[column]) for row in everything) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in everything
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pipelinerl status", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="run folder (output_dir); with --leave also redis://HOST:PORT/RUN")
    parser.add_argument("--watch", action="store_true", help="show it again and again until the run ends")
    parser.add_argument("--stacks", action="store_true", help="also print every live role's Python stacks")
    parser.add_argument(
        "--ledger", action="store_true", help="what became of every rollout; exits with 1 if one is lost"
    )
    parser.add_argument("--json", action="store_true", help="with --ledger: a JSON object per rollout")
    parser.add_argument("--leave", metavar="SERVER", help="ask this server to end what it does and leave the run")
    arguments = parser.parse_args(argv)
    if arguments.json and not arguments.ledger:
        parser.error("--json needs --ledger")
    run_dir = Path(arguments.run).resolve()
    if arguments.leave:
        ask_to_leave(store_of(arguments.run), arguments.leave)
        print(f"{arguments.leave} is asked to leave: it takes no new request and ends with its last one")
        return 0
    if arguments.ledger:
        return ledger.show(run_dir, as_json=arguments.json)
    if arguments.watch:
        watch(run_dir)
        return 0
    lines = screen(run_dir)
    if arguments.stacks:
        lines += ["", *dump_stacks(run_dir, read_statuses(run_dir))]
    print("\n".join(lines))
    return 0
