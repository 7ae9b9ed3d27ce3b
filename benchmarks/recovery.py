"""Kills and freezes roles of real runs at seeded random moments: does the run end as if nothing had happened, how soon?

    python benchmarks/recovery.py --runs 50 --json benchmarks/recovery.json
    python benchmarks/recovery.py --runs 50 --faults 2 --victims finetune@checkpoint redis --actions freeze
    python benchmarks/recovery.py --frozen-server --json benchmarks/frozen_server.json
    python benchmarks/recovery.py --idle --json benchmarks/idle.json

Each run is a short quickstart on one prebuilt model with `--faults` strikes, dealt from a seeded deck of victims ×
actions: SIGKILL, or SIGSTOP for ever (the supervisor's heartbeat rule must act). A world has what its victims need: a
second inference server, redis, a verifier that judges every answer. Every fifth run is left undisturbed, for
comparison. `finetune@update` and `finetune@checkpoint` strike while weights are on their way and while a checkpoint is
being written, `finetune@evaluation` after the last step.

A run passes when it ends by itself with exit 0, the ledger shows every optimizer step trained from distinct samples and
none lost without a reason, and no process, port, shared-memory segment or half-written checkpoint is left. Held-out
success is compared with that of the undisturbed runs. `recovery_s` is the time from the strike to the next progress of
the role's new process, `stall_s` the longest pause between two optimizer steps from the first strike on.

Results are appended: the same command goes on where it was interrupted.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil

from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.finetune.checkpoints import checkpoint_root, unpublished_name
from pipelinerl.inspect import ledger
from pipelinerl.inspect.outside import look_into, process_environment
from pipelinerl.launcher.reaper import marked_processes, send, shared_memory_of
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.observability.status import StatusRecord, read_statuses
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.world import WorldMap

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05
WATCH_S = 0.002
UPDATE_S = 0.06
"""About how long an update of the tiny model is on its way."""
BATCH, STEPS, CAMPAIGN_STEPS = 64, 160, 64
UNDISTURBED_EVERY = 5
TWO_SERVERS = ("world.cpu_slots=3", "world.actor_fraction=2", "world.finetune_fraction=1")
JUDGED = (
    "world.verifier_replicas=1",
    "actor.rollout_policy=benchmarks.judged.generate_rollout",
    "dataset_loader=benchmarks.judged.load_problems",
)
WORLDS = {"actor_llm": TWO_SERVERS, "verifier": JUDGED, "redis": ("streams=redis",)}
"""What the quickstart's world needs for a victim of this kind."""
VICTIMS = (
    *("actor", "actor_llm", "preprocessor", "finetune", "finetune@update", "finetune@checkpoint"),
    *("verifier", "redis", "finetune@evaluation"),
)
SHORT = (
    "tiny_model.seed=0",
    "finetune.save_checkpoint_steps=8",
    "launcher.heartbeat_timeout_s=12",
    "launcher.hang_timeout_s=60",
    "launcher.max_restarts=20",
    "weights.timeout_s=10",
    "max_lag_steps=1",
    "dataset_loader_params.num_test_problems=256",
)
Action = Literal["kill", "freeze"]
Moment = Literal["any", "update", "checkpoint", "evaluation"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One disturbance of one job."""

    job: str
    step: int
    """After this optimizer step has been made."""
    action: Action = "kill"
    moment: Moment = "any"
    delay_s: float = 0.0
    """From the moment to the strike."""
    thaw_s: float | None = None
    """`freeze`: SIGCONT after so many seconds; None = never."""
    child: bool = False
    """Hit a process that the job started (engine, worker, redis-server) instead of the job's own, or than all."""


@dataclass(frozen=True, kw_only=True)
class Blow:
    """A strike that was made."""

    strike: Strike
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
    missed: int = 0
    """Strikes whose moment never came."""
    success: float | None = None
    samples: dict[str, int] = field(default_factory=dict)
    """The ledger's counts: trained, dropped by reason, …"""
    restarts: dict[str, int] = field(default_factory=dict)
    stall_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """Everything that a run must not show; empty = passed."""


class StruckRun:
    """A run under way, as this process sees it from outside."""

    def __init__(self, run_dir: Path, overrides: Sequence[str], steps: int, timeout_s: float):
        self.run_dir, self.steps = run_dir, steps
        self.started = time.time()
        self._deadline = self.started + timeout_s
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.output_path = run_dir.parent / f"{run_dir.name}.out"
        argv = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
        with self.output_path.open("wb") as output:
            self.launcher = subprocess.Popen(
                [*argv, f"finetune.max_train_steps={steps}", *overrides], stdout=output, stderr=output, cwd=ROOT
            )
        self.mark = ""
        """What every process of the run has in its environment."""
        self.shared_memory: set[str] = set()
        """Segments that the run's processes were seen to use."""
        self._metrics = run_dir / "metrics" / "finetune.jsonl"
        self._inode = self._read_to = self._last_step = 0

    def is_going(self) -> bool:
        return self.launcher.poll() is None and time.time() < self._deadline

    def wait_for(self, condition: Callable[[], T], poll_s: float = POLL_S) -> T | None:
        """The first true value of the condition; None when the run ended before."""
        while self.is_going():
            if value := condition():
                return value
            time.sleep(poll_s)
        return None

    def has_made(self, step: int) -> bool:
        """Whether an optimizer step was ever made, seen about two milliseconds after it."""
        with contextlib.suppress(FileNotFoundError), self._metrics.open("rb") as stream:
            held = os.fstat(stream.fileno())
            if held.st_ino != self._inode or held.st_size < self._read_to:  # a resumed trainer takes steps back
                self._inode, self._read_to = held.st_ino, 0
            stream.seek(self._read_to)
            for line in stream:
                if line.endswith(b"\n"):
                    self._read_to += len(line)
                    self._last_step = max(self._last_step, json.loads(line)["step"])
        return self._last_step >= step

    def job(self, name: str) -> StatusRecord | None:
        """The status of a job that lives and has done something; a restart begins without one."""
        status = read_statuses(self.run_dir).get(name)
        return status if status and status.state == "running" and status.progress_count else None

    def live(self, name: str) -> tuple[StatusRecord, list[int]] | None:
        """A job's status and processes, once there are any: the status of one that was killed stays for a moment."""
        status = self.job(name)
        pids = processes_of(status) if status else []
        return (status, pids) if status and pids else None

    def has_come(self, moment: Moment, step: int) -> bool:
        if moment == "checkpoint":
            return any(checkpoint_root(self.run_dir).glob(unpublished_name(0).replace("0", "*")))
        if moment == "evaluation":
            actor = self.job("actor_0")
            return actor is not None and int(actor.fields.get("evaluating", -1)) >= step
        return True

    def look(self) -> None:
        """Note what the run's processes use, to see at the end that nothing of it is left."""
        for status in read_statuses(self.run_dir).values():
            if token := process_environment(status.pid).get(RUN_VARIABLE):
                self.mark = f"{RUN_VARIABLE}={token}"
        if self.mark:
            self.shared_memory |= shared_memory_of(marked_processes(self.mark))

    def strike(self, strike: Strike, watchers: ThreadPoolExecutor) -> Future[Blow] | None:
        """Wait for the moment, strike, have the job's next progress watched; None when the run ended before."""
        self.wait_for(lambda: self.has_made(strike.step), WATCH_S)
        self.wait_for(lambda: self.has_come(strike.moment, strike.step), WATCH_S)
        found = self.wait_for(lambda: self.live(strike.job))
        if found is None:
            return None
        self.look()
        status, pids = found
        children = [pid for pid in pids if pid != status.pid]
        hit = children[-1:] if strike.child and children else pids if strike.action == "freeze" else [status.pid]
        time.sleep(strike.delay_s)
        struck = time.time()
        send(hit, signal.SIGKILL if strike.action == "kill" else signal.SIGSTOP)
        if strike.thaw_s is not None:
            time.sleep(strike.thaw_s)
            send(hit, signal.SIGCONT)
        return watchers.submit(self.await_progress, status, strike, struck)

    def await_progress(self, before: StatusRecord, strike: Strike, struck: float) -> Blow:
        """Watch until the job moves again, its new process or the one it had, or the run ends."""
        kept = strike.thaw_s is not None or (strike.child and strike.job.startswith(("actor_0", "verifier")))
        since = struck + (strike.thaw_s or 0.0)

        def moved() -> StatusRecord | None:
            now = self.job(strike.job)
            return now if now and now.progress_at > since and (kept or now.pid != before.pid) else None

        now = self.wait_for(moved)
        return Blow(strike=strike, time=struck, recovery_s=now.progress_at - struck if now else None)

    def end(self) -> int:
        """Wait for the end; a run that does not end is interrupted as by Ctrl-C."""
        try:
            return self.launcher.wait(max(self._deadline - time.time(), 1.0))
        except subprocess.TimeoutExpired:
            return -1
        finally:
            stop(self.launcher)


def run_struck(
    run_dir: Path,
    strikes: Sequence[Strike],
    overrides: Sequence[str] = (),
    *,
    steps: int = STEPS,
    timeout_s: float = 900.0,
) -> Outcome:
    """Run the quickstart in ``run_dir``, make the strikes in their order, wait for its end and check everything."""
    run = StruckRun(run_dir, overrides, steps, timeout_s)
    try:
        with ThreadPoolExecutor() as watchers:
            run.wait_for(lambda: run.has_made(1))
            run.look()
            made: dict[Strike, Future[Blow] | None] = {}
            for strike in strikes:
                for earlier, watcher in made.items():
                    if earlier.job == strike.job and watcher:
                        watcher.result()  # the same job again only when it has recovered
                made[strike] = run.strike(strike, watchers)
            code = run.end()
    finally:
        stop(run.launcher)
    blows = [watcher.result() for watcher in made.values() if watcher]
    outcome = Outcome(
        exit_code=code,
        seconds=time.time() - run.started,
        output=run.output_path.read_text(errors="replace"),
        blows=blows,
        missed=len(strikes) - len(blows),
    )
    check(run, outcome)
    return outcome


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def processes_of(status: StatusRecord) -> list[int]:
    """All processes of the job whose status this is, found by the mark that they inherit."""
    mark = process_environment(status.pid).get(ROLE_VARIABLE, "")
    return marked_processes(f"{ROLE_VARIABLE}={mark}") if mark.endswith(f"/{status.job}") else []


def check(run: StruckRun, outcome: Outcome) -> None:
    """Everything that must hold at the end of a run that was struck."""
    problems = outcome.problems
    problems += leftovers(run)
    if outcome.exit_code != 0:
        problems.append(f"exit code {outcome.exit_code}")
    book = ledger.read(run.run_dir)
    outcome.samples = dict(sorted(book.counts().items()))
    problems += book.violations
    if outcome.samples.get("trained") != run.steps * BATCH:
        problems.append(f"{outcome.samples.get('trained')} samples trained instead of {run.steps * BATCH}")
    outcome.stall_s = longest_stall(run.run_dir, min((blow.time for blow in outcome.blows), default=0.0))
    if (run.run_dir / "summary.json").is_file():
        outcome.success = json.loads((run.run_dir / "summary.json").read_text())["success_after"]
    outcome.restarts = restarts_of(outcome.output)


def longest_stall(run_dir: Path, since: float) -> float:
    """Longest time between two optimizer steps after ``since``."""
    times = [point["time"] for point in read_metrics(run_dir, "finetune")]
    return max((late - early for early, late in itertools.pairwise(times) if late > since), default=0.0)


def restarts_of(output: str) -> dict[str, int]:
    """The launcher's last word about restarts, `restarts: actor_0 1, finetune_0 2`."""
    lines = [line for line in output.splitlines() if line.startswith("restarts: ")]
    pairs = [pair.rsplit(" ", 1) for pair in lines[-1].removeprefix("restarts: ").split(", ")] if lines else []
    return {job: int(count) for job, count in pairs}


def leftovers(run: StruckRun) -> list[str]:
    """Processes, listening ports, shared memory and half-written checkpoints that a finished run left."""
    found = [f"process {pid} is left" for pid in marked_processes(run.mark)] if run.mark else ["no process was seen"]
    for job in WorldMap.load(run.run_dir).jobs:
        if job.port is not None:
            with contextlib.suppress(OSError), socket.create_connection((job.hostname, job.port), timeout=1):
                found.append(f"port {job.port} of {job.name} still listens")
    found += [f"{path} is left" for path in run.shared_memory if os.path.exists(path)]
    return found + [f"{path.name} is left" for path in checkpoint_root(run.run_dir).glob(".step_*")]


# The campaign


def deal(seed: int, index: int, args: argparse.Namespace) -> list[Strike]:
    """The strikes of run ``index``: a pure function of the arguments. The deck is shuffled anew when it is used up."""
    if index % UNDISTURBED_EVERY == UNDISTURBED_EVERY - 1:
        return []
    disturbed = index - index // UNDISTURBED_EVERY
    deck = [(victim, action) for victim in args.victims for action in args.actions]
    cards = []
    for place in range(disturbed * args.faults, (disturbed + 1) * args.faults):
        shuffled = random.Random(f"{seed}/{place // len(deck)}").sample(deck, len(deck))
        cards.append(shuffled[place % len(deck)])
    rng = random.Random(f"{seed}/run {index}")
    strikes = [make_strike(rng, victim, action, args.steps) for victim, action in cards]
    return sorted(strikes, key=lambda strike: strike.step)


def make_strike(rng: random.Random, victim: str, action: Action, steps: int) -> Strike:
    """A random moment for ``victim``, a kind with an optional `@update`, `@checkpoint` or `@evaluation`."""
    kind, _, moment = victim.partition("@")
    longest = {"update": UPDATE_S, "checkpoint": 0.03}.get(moment, 0.5)
    return Strike(
        job=f"actor_llm_{rng.randrange(2)}" if kind == "actor_llm" else f"{kind}_0",
        step=steps if moment == "evaluation" else rng.randrange(2, steps - 9),
        action=action,
        moment=moment or "any",  # type: ignore[arg-type]
        delay_s=round(rng.uniform(0.0, longest), 3),
        child=kind in ("actor_llm", "redis") and rng.random() < 0.5,
    )


def world_of(strikes: Sequence[Strike]) -> list[str]:
    """Overrides for a world in which there is what is to be struck."""
    kinds = {strike.job.rpartition("_")[0] for strike in strikes}
    return [override for kind in sorted(kinds & WORLDS.keys()) for override in WORLDS[kind]]


def run_campaign(args: argparse.Namespace, folder: Path, results: list[dict[str, Any]]) -> None:
    """Appends the missing runs to the results, and writes them after each."""
    made = {result["index"] for result in results}
    missing = [index for index in range(args.runs) if index not in made]
    pool = ThreadPoolExecutor(args.jobs)
    try:
        for indices in (missing[:1], missing[1:]):  # the first one alone: it makes the model
            for finished in as_completed([pool.submit(run_dealt, args, folder, index) for index in indices]):
                results.append(finished.result())
                results.sort(key=lambda result: result["index"])
                print(json.dumps(finished.result()), flush=True)
                write(args, results)
    finally:
        pool.shutdown(cancel_futures=True)


def run_dealt(args: argparse.Namespace, folder: Path, index: int) -> dict[str, Any]:
    """Run ``index`` of the campaign; its folder stays if it failed."""
    strikes = deal(args.seed, index, args)
    overrides = [f"model_path={folder / 'model'}", *SHORT, *world_of(strikes), *args.overrides]
    outcome = run_struck(folder / f"run{index}", strikes, overrides, steps=args.steps, timeout_s=args.timeout)
    if not outcome.problems:
        shutil.rmtree(folder / f"run{index}")
    return {"seed": args.seed, "index": index, "world": world_of(strikes), **row(outcome)}


def row(outcome: Outcome) -> dict[str, Any]:
    """One run as one line."""
    return {
        "passed": not outcome.problems,
        "problems": outcome.problems,
        "strikes": [blow_row(blow) for blow in outcome.blows],
        "missed": outcome.missed,
        "exit_code": outcome.exit_code,
        "success": outcome.success,
        "samples": outcome.samples,
        "restarts": outcome.restarts,
        "stall_s": round(outcome.stall_s, 2),
        "seconds": round(outcome.seconds, 1),
    }


def blow_row(blow: Blow) -> dict[str, Any]:
    plain = asdict(blow.strike)
    recovery = None if blow.recovery_s is None else round(blow.recovery_s, 2)
    return {name: value for name, value in plain.items() if value is not None} | {"recovery_s": recovery}


def write(args: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    """The document: figures over all runs, then one line per run."""
    if not args.json:
        return
    head = json.dumps({"command": " ".join(sys.argv), "seed": args.seed, **figures(results)}, indent=2)
    rows = ",\n".join("    " + json.dumps(result) for result in results)
    args.json.write_text(head.removesuffix("\n}") + ',\n  "results": [\n' + rows + "\n  ]\n}\n")


def figures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Passed runs, strikes by victim, success with and without disturbance, recovery times."""
    calm = [r["success"] for r in results if not r["strikes"] and r["success"] is not None]
    struck = [r["success"] for r in results if r["strikes"] and r["success"] is not None]
    blows = [blow for result in results for blow in result["strikes"]]
    return {
        "runs": len(results),
        "runs_struck": sum(bool(r["strikes"]) for r in results),
        "passed": sum(r["passed"] for r in results),
        "strikes": len(blows),
        "success_undisturbed": spread(calm),
        "success_struck": spread(struck),
        "by_victim": {
            name: recovery([b for b in blows if victim_of(b) == name]) for name in sorted(set(map(victim_of, blows)))
        },
    }


def victim_of(blow: dict[str, Any]) -> str:
    kind = blow["job"].rpartition("_")[0] + ("" if blow["moment"] == "any" else f"@{blow['moment']}")
    return f"{blow['action']} {kind}{' child' if blow['child'] else ''}"


def recovery(blows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often, and the seconds from strike to progress where the role came back before the run ended."""
    times = sorted(blow["recovery_s"] for blow in blows if blow["recovery_s"] is not None)
    return {"strikes": len(blows)} | ({"median_s": times[len(times) // 2], "max_s": times[-1]} if times else {})


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"runs": 0}
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    numbers = {"mean": statistics.fmean(values), "sd": deviation, "min": min(values), "max": max(values)}
    return {"runs": len(values)} | {name: round(number, 4) for name, number in numbers.items()}


# One frozen server


def measure_frozen_server(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One of two servers frozen for the rest of the run, which no supervisor ends: what do the updates cost?"""
    run_dir = folder / "frozen"
    timeouts = ("launcher.heartbeat_timeout_s=3600", "launcher.hang_timeout_s=3600", "weights.timeout_s=10")
    overrides = [f"model_path={folder / 'model'}", *SHORT, *TWO_SERVERS, *timeouts, *args.overrides]
    strike = Strike(job="actor_llm_1", step=5, action="freeze")
    outcome = run_struck(run_dir, [strike], overrides, steps=args.steps, timeout_s=args.timeout)
    with look_into(run_dir), open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None) as reader:
        messages = [m for _, m in reader.read_all() if isinstance(m, WeightUpdateSuccess)]
    updates = [m for m in messages if m.version]  # the first one waits for cold servers
    struck = outcome.blows[0].time
    before = sorted(m.transfer_ms / 1e3 for m in updates if m.timestamp < struck)
    after = sorted(m.transfer_ms / 1e3 for m in updates if m.timestamp >= struck)
    return {
        "weights_timeout_s": 10,
        "updates_before": {"count": len(before), "median_s": statistics.median(before), "max_s": before[-1]},
        "updates_after": {"count": len(after), "median_s": statistics.median(after), "two_slowest_s": after[-2:]},
        "servers_at_end": list(updates[-1].servers),
        **row(outcome),
    }


# Waiting


def measure_idle(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """CPU of every role, its workers included, while the trainer is frozen for a while and all others wait for it."""
    settle_s, measure_s = 8.0, 15.0
    overrides = [f"model_path={folder / 'model'}", *SHORT, "launcher.heartbeat_timeout_s=120", *args.overrides]
    run = StruckRun(folder / "idle", overrides, args.steps, args.timeout)
    try:
        run.wait_for(lambda: run.has_made(5))
        statuses = read_statuses(run.run_dir)
        trainer = processes_of(statuses["finetune_0"])
        send(trainer, signal.SIGSTOP)
        time.sleep(settle_s)
        waiting = {name: processes_of(status) for name, status in statuses.items() if name != "finetune_0"}
        waiting["launcher"] = [run.launcher.pid]
        before = {name: sum(map(cpu_seconds, pids)) for name, pids in waiting.items()}
        time.sleep(measure_s)
        cores = {name: (sum(map(cpu_seconds, pids)) - before[name]) / measure_s for name, pids in waiting.items()}
        send(trainer, signal.SIGCONT)
        code = run.end()
    finally:
        stop(run.launcher)
    return {"seconds": measure_s, "cores": {n: round(c, 4) for n, c in cores.items()}, "passed": code == 0}


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--faults", type=int, default=1, help="strikes per run")
    parser.add_argument("--victims", nargs="+", choices=VICTIMS, default=VICTIMS)
    parser.add_argument("--actions", nargs="+", choices=("kill", "freeze"), default=("kill", "freeze"))
    parser.add_argument("--frozen-server", action="store_true", help="measure updates beside a server frozen for ever")
    parser.add_argument("--idle", action="store_true", help="measure what roles cost that wait for a frozen trainer")
    parser.add_argument("--steps", type=int, default=CAMPAIGN_STEPS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="model and run folders that failed (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="configuration overrides, as for pipelinerl.launch")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="recovery-"))).resolve()
    if args.frozen_server or args.idle:
        document = (measure_frozen_server if args.frozen_server else measure_idle)(args, folder)
        print(json.dumps(document, indent=2))
        if args.json:
            args.json.write_text(json.dumps(document, indent=2) + "\n")
        sys.exit(0 if document["passed"] else 1)
    results = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    run_campaign(args, folder, results)
    print(json.dumps(figures(results), indent=2))
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
