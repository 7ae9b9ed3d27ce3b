"""Kills or freezes roles of real runs at seeded random moments, and measures how soon they go on.

    python benchmarks/recovery.py --runs 8 --roles actor preprocessor finetune actor_llm --json benchmarks/recovery.json

Each run is the quickstart with one disturbance: SIGKILL, or SIGSTOP for ever (the supervisor's heartbeat rule must act)
or for a while (`--thaw`). `finetune@update` and `finetune@checkpoint` strike while weights are on their way and while a
checkpoint is being written, `actor_llm@evaluation` during an evaluation; `--servers 2` gives the run two inference
servers. A run passes when it ends by itself with exit 0, the ledger shows every optimizer step trained from distinct
samples and none lost, the held-out success is in its place, and no process, port or half-written checkpoint is left.
`recovery_s` is the time from the strike to the next progress of the role's new (or thawed) process; `stall_s` the
longest pause between two optimizer steps from then on.
"""

import argparse
import contextlib
import itertools
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipelinerl import ledger
from pipelinerl.finetune.checkpoints import checkpoint_root, unpublished_name
from pipelinerl.launcher.guardian import marked_processes, send
from pipelinerl.launcher.processes import ROLE_VARIABLE
from pipelinerl.observability.status import StatusRecord, read_statuses
from pipelinerl.records import EvaluationStarted, SamplesProcessed, TrainerMessage
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from pipelinerl.world import WorldMap

POLL_S = 0.02
WATCH_S = 0.002
BATCH, STEPS = 64, 96
TWO_SERVERS = ("world.cpu_slots=3", "world.actor_fraction=2", "world.finetune_fraction=1")
Moment = Literal["any", "update", "checkpoint", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One disturbance of one job."""

    job: str
    step: int
    """After this optimizer step has been announced."""
    action: Literal["kill", "freeze"] = "kill"
    moment: Moment = "any"
    delay_s: float = 0.0
    """`any`: from the announcement of the step to the strike."""
    thaw_s: float | None = None
    """`freeze`: SIGCONT after so many seconds; None = never."""
    child: bool = False
    """Hit a process that the job started (vLLM's engine) instead of the job's own, or than all when freezing."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A strike that was made."""

    strike: Strike
    pid: int
    time: float
    recovery_s: float | None
    """None: the run ended before the job moved again (another server did its work)."""


@dataclass(kw_only=True)
class Outcome:
    """What became of a run."""

    exit_code: int
    seconds: float
    output: str
    blows: list[Blow] = field(default_factory=list)
    success: float | None = None
    trained: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    stall_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """Everything that a run must not show; empty = passed."""


def run_struck(
    run_dir: Path,
    strikes: Sequence[Strike],
    overrides: Sequence[str] = (),
    *,
    steps: int = STEPS,
    min_success: float = 0.0,
    timeout_s: float = 900.0,
) -> Outcome:
    """Run the quickstart in ``run_dir``, make the strikes in their order, wait for its end and check everything."""
    started = time.time()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    output = run_dir.parent / f"{run_dir.name}.out"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command(run_dir, f"finetune.max_train_steps={steps}", *overrides), stdout=stream, stderr=stream
        )
        try:
            with ThreadPoolExecutor() as watchers:
                blows = [make_strike(run_dir, process, strike, started + timeout_s, watchers) for strike in strikes]
                code = process.wait(max(started + timeout_s - time.time(), 1.0))
        except subprocess.TimeoutExpired:
            blows, code = [], -1
        finally:
            stop(process)
    outcome = Outcome(exit_code=code, seconds=time.time() - started, output=output.read_text(errors="replace"))
    outcome.blows = [watcher.result() for watcher in blows if watcher]
    check(run_dir, outcome, len(strikes), steps, min_success)
    return outcome


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}", *overrides]


def stop(process: subprocess.Popen[bytes]) -> None:
    """A run that did not end is interrupted as by Ctrl-C."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_strike(
    run_dir: Path, launcher: subprocess.Popen[bytes], strike: Strike, deadline: float, watchers: ThreadPoolExecutor
) -> Future[Blow] | None:
    """Wait for the moment, strike, have the job's next progress watched; None when the run ended before."""
    if not await_moment(run_dir, launcher, strike, deadline):
        return None
    status = read_statuses(run_dir).get(strike.job)
    pids = processes_of(status) if status else []
    if status is None or not pids:
        return None
    children = [pid for pid in pids if pid != status.pid]
    pid = children[-1] if strike.child and children else status.pid
    struck = time.time()
    if strike.action == "kill":
        send([pid], signal.SIGKILL)
    else:
        frozen = [pid] if strike.child else pids
        send(frozen, signal.SIGSTOP)
        if strike.thaw_s is not None:
            time.sleep(strike.thaw_s)
            send(frozen, signal.SIGCONT)
    return watchers.submit(await_progress, run_dir, launcher, status, strike, pid, struck, deadline)


def processes_of(status: StatusRecord) -> list[int]:
    """All processes of the job whose status this is, found by the mark that they inherit."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{status.pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(f"{ROLE_VARIABLE}=".encode()) and entry.endswith(f"/{status.job}".encode()):
                return marked_processes(entry.decode())
    return []


def await_moment(run_dir: Path, launcher: subprocess.Popen[bytes], strike: Strike, deadline: float) -> bool:
    """Whether the moment came while the run was going on."""

    def going() -> bool:
        return launcher.poll() is None and time.time() < deadline

    set_streams_backend("files")
    with open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None, start=0) as reader:
        while going():
            steps = [m.step for _, m in reader.poll(POLL_S) if isinstance(m, SamplesProcessed)]
            if any(step >= strike.step for step in steps):
                break
    if strike.moment == "checkpoint":
        while going() and not any(checkpoint_root(run_dir).glob(unpublished_name(0).replace("0", "*"))):
            time.sleep(WATCH_S)
    if strike.moment == "evaluation":
        with open_reader(SingleStreamSpec(run_dir, "evaluation"), EvaluationMessage, name=None, start=0) as reader:
            while going():
                news = [m for _, m in reader.poll(POLL_S) if isinstance(m, EvaluationStarted)]
                if any(m.version >= strike.step for m in news):
                    break
    time.sleep(strike.delay_s)
    return going()


def await_progress(
    run_dir: Path,
    launcher: subprocess.Popen[bytes],
    before: StatusRecord,
    strike: Strike,
    pid: int,
    struck: float,
    deadline: float,
) -> Blow:
    """Watch until the job moves again, its new process or the thawed one, or the run ends."""
    thawed = strike.action == "freeze" and strike.thaw_s is not None
    since = struck + (strike.thaw_s or 0.0)
    while launcher.poll() is None and time.time() < deadline:
        now = read_statuses(run_dir).get(before.job)
        if now and now.progress_count and now.progress_at > since and (thawed or now.pid != before.pid):
            return Blow(strike=strike, pid=pid, time=struck, recovery_s=now.progress_at - struck)
        time.sleep(POLL_S)
    return Blow(strike=strike, pid=pid, time=struck, recovery_s=None)


def check(run_dir: Path, outcome: Outcome, num_strikes: int, steps: int, min_success: float) -> None:
    """Everything that must hold at the end of a run that was struck."""
    problems = outcome.problems
    if outcome.exit_code != 0:
        problems.append(f"exit code {outcome.exit_code}")
    if len(outcome.blows) != num_strikes:
        problems.append(f"{len(outcome.blows)} of {num_strikes} strikes were made")
    book = ledger.read(run_dir)
    outcome.trained = book.counts().get("trained", 0)
    problems += book.violations
    if outcome.trained != steps * BATCH:
        problems.append(f"{outcome.trained} samples trained instead of {steps * BATCH}")
    outcome.stall_s = longest_stall(run_dir, min((blow.time for blow in outcome.blows), default=time.time()))
    if (run_dir / "summary.json").is_file():
        summary = json.loads((run_dir / "summary.json").read_text())
        outcome.success = summary["success_after"]
    if (outcome.success or 0.0) < min_success:
        problems.append(f"held-out success {outcome.success} is below {min_success}")
    outcome.restarts = restarts_of(outcome.output)
    problems += leftovers(run_dir)


def longest_stall(run_dir: Path, since: float) -> float:
    """Longest time between two announcements of optimizer steps after ``since``."""
    with open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None) as reader:
        times = [m.timestamp for _, m in reader.read_all() if isinstance(m, SamplesProcessed)]
    return max((late - early for early, late in itertools.pairwise(times) if late > since), default=0.0)


def restarts_of(output: str) -> dict[str, int]:
    """The launcher's last word about restarts, `restarts: actor_0 1, finetune_0 2`."""
    lines = [line for line in output.splitlines() if line.startswith("restarts: ")]
    pairs = [pair.rsplit(" ", 1) for pair in lines[-1].removeprefix("restarts: ").split(", ")] if lines else []
    return {job: int(count) for job, count in pairs}


def leftovers(run_dir: Path) -> list[str]:
    """Processes, listening ports and half-written checkpoints that a finished run left."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"--run-dir\0{run_dir}\0".encode() in (folder / "cmdline").read_bytes():
                found.append(f"process {folder.name} is left")
    for job in WorldMap.load(run_dir).jobs:
        if job.port is not None:
            with contextlib.suppress(OSError), socket.create_connection((job.hostname, job.port), timeout=1):
                found.append(f"port {job.port} of {job.name} still listens")
    found += [f"{path.name} is left" for path in checkpoint_root(run_dir).glob(".step_*")]
    return found


def plan_strike(rng: random.Random, role: str, action: str, thaw_s: float | None, steps: int) -> Strike:
    """A seeded random moment for ``role``, a job or kind with an optional `@update` or `@checkpoint`."""
    kind, _, moment = role.partition("@")
    return Strike(
        job=kind if kind[-1].isdigit() else f"{kind}_0",
        step=rng.randrange(2, steps - 8),
        action=action,  # type: ignore[arg-type]
        moment=moment or "any",  # type: ignore[arg-type]
        delay_s=0.0 if moment else rng.uniform(0.0, 0.5),
        thaw_s=thaw_s,
        child=kind.startswith("actor_llm") and rng.random() < 0.5,
    )


def run_campaign(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rng = random.Random(args.seed)
    results = []
    for index in range(args.runs):
        role = args.roles[index % len(args.roles)]
        strike = plan_strike(rng, role, args.action, args.thaw, args.steps)
        overrides = [
            "finetune.save_checkpoint_steps=8",
            "launcher.heartbeat_timeout_s=15",
            "weights.timeout_s=10",
            *(TWO_SERVERS if args.servers == 2 else ()),
            *args.overrides,
        ]
        outcome = run_struck(
            folder / f"run{index}", [strike], overrides, steps=args.steps, min_success=args.min_success
        )
        result = {name: value for name, value in asdict(outcome).items() if name != "output"}
        results.append({"role": role, "passed": not outcome.problems} | result)
        times = ", ".join(f"{blow.recovery_s:.1f} s" for blow in outcome.blows if blow.recovery_s is not None)
        print(
            f"run {index}: {strike.action} {role} after step {strike.step}: "
            f"{'; '.join(outcome.problems) or 'passed'}; recovery {times or '-'}, stall {outcome.stall_s:.1f} s, "
            f"success {outcome.success}, {outcome.seconds:.0f} s",
            flush=True,
        )
        if not outcome.problems:
            shutil.rmtree(folder / f"run{index}")
    return results


def recovery_by_role(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median and worst seconds from strike to progress."""
    times: dict[str, list[float]] = {}
    for result in results:
        for blow in result["blows"]:
            if blow["recovery_s"] is not None:
                times.setdefault(result["role"], []).append(blow["recovery_s"])
    return {
        role: {"runs": len(values), "median_s": sorted(values)[len(values) // 2], "max_s": max(values)}
        for role, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill or freeze roles of real runs; measure how soon they go on.")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--roles", nargs="+", default=["actor", "preprocessor", "finetune", "actor_llm"])
    parser.add_argument("--action", choices=("kill", "freeze"), default="kill")
    parser.add_argument("--thaw", type=float, help="freeze: continue the role after so many seconds (default: never)")
    parser.add_argument("--servers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--min-success", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep run folders that failed here (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="configuration overrides, as for pipelinerl.launch")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="recovery-"))
    results = run_campaign(args, folder)
    document = {
        "command": " ".join(sys.argv),
        "passed": sum(result["passed"] for result in results),
        "runs": len(results),
        "recovery": recovery_by_role(results),
        "results": results,
    }
    print(json.dumps(document["recovery"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    sys.exit(0 if document["passed"] == len(results) else 1)


if __name__ == "__main__":
    main()
