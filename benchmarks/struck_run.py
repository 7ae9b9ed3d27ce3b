"""A short quickstart that is struck: roles and what surrounds them are killed, frozen, left without disk, misled.

`run_struck` runs it, makes the strikes in their order, starts the same command again where a strike ended the run, and
checks everything that must hold at the end. `recovery.py` deals the strikes of a campaign.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import psutil
import redis

from benchmarks.misbehaving import WAYS, misbehaviour_of
from benchmarks.own_disk import fill, freeze_writes, own_disk
from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE, redis_password
from pipelinerl.finetune.checkpoints import checkpoint_root, unpublished_name
from pipelinerl.inspect import ledger
from pipelinerl.inspect.reading import process_environment
from pipelinerl.launcher.reaper import marked_processes, shared_memory_of, signal_all
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.observability.status import StatusRecord, read_statuses
from pipelinerl.world import WorldMap

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05
WATCH_S = 0.002
BATCH, STEPS = 64, 160
MAX_LAUNCHES = 4
WHILE_S = 3.0
"""How long what surrounds a run stays away, unless a strike says how long."""
EVALUATION_STARTED = re.compile(r"event=evaluation_(?:started|restarted) version=(\d+)")
"""In the actor's log."""
Action = Literal["kill", "freeze"]
Moment = Literal["any", "update", "checkpoint", "evaluation", "startup", "resume", "summary"]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Strike:
    """One disturbance of one job."""

    job: str
    """A job, several joined by + (at once), or one of `AROUND`."""
    step: int
    """After this optimizer step has been made."""
    action: Action = "kill"
    moment: Moment = "any"
    delay_s: float = 0.0
    """From the moment to the strike."""
    thaw_s: float | None = None
    """`freeze`: SIGCONT after so many seconds; None = never. Of `AROUND`: for how long; None = `WHILE_S`."""
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
    launches: int = 1
    """How often the command was started until the run had ended."""
    success: float | None = None
    samples: dict[str, int] = field(default_factory=dict)
    """The ledger's counts: trained, dropped by reason, …"""
    restarts: dict[str, int] = field(default_factory=dict)
    stall_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    """Everything that a run must not show; empty = passed."""


class StruckRun:
    """A run under way, as this process sees it from outside."""

    def __init__(
        self,
        run_dir: Path,
        overrides: Sequence[str],
        steps: int,
        timeout_s: float,
        *,
        batch: int = BATCH,
        misled: bool = False,
    ):
        """``batch``: rollouts of a step. ``misled``: the run's processes follow ``clock``."""
        self.run_dir, self.steps, self.batch = run_dir, steps, batch
        self.started = time.time()
        self._deadline = self.started + timeout_s
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.output_path = run_dir.parent / f"{run_dir.name}.out"
        argv = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
        sizes = (f"finetune.max_train_steps={steps}", f"finetune.gradient_accumulation_passes={batch}")
        self._argv = [*argv, *sizes, *overrides]
        self.clock = Path(f"{run_dir}.clock")
        """Once this file exists, the clock of every Python process of the run is an hour back."""
        hooks = os.pathsep.join([str(ROOT / "tests" / "clock_hook"), os.environ.get("PYTHONPATH", "")])
        self._env = {"PYTHONPATH": hooks, "CLOCK_BACK_FILE": str(self.clock)} if misled else {}
        self.launches = 0
        self.launch()
        self.marks: set[str] = set()
        """Each launch has one, which all its processes have in their environment."""
        self.paths: set[str] = set()
        """Shared memory and temporary folders that the run's processes were seen to use."""
        self._metrics = run_dir / "metrics" / "finetune.jsonl"
        self._inode = self._read_to = self._last_step = 0

    def launch(self) -> None:
        """Start the command, which resumes a run that has begun."""
        self.launches += 1
        env = os.environ | self._env
        with self.output_path.open("ab") as output:
            self.launcher = subprocess.Popen(self._argv, stdout=output, stderr=output, cwd=ROOT, env=env)

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
                    with contextlib.suppress(json.JSONDecodeError):  # a cut of the power may leave anything
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

    def starting(self, name: str) -> tuple[StatusRecord, list[int]] | None:
        """A job that is alive and has done nothing yet."""
        status = read_statuses(self.run_dir).get(name)
        pids = processes_of(status) if status and status.state == "running" and not status.progress_count else []
        return (status, pids) if status and pids else None

    def has_come(self, moment: Moment, step: int) -> bool:
        if moment == "summary":
            self.look()
            return not any(map(marked_processes, self.marks))
        if moment == "checkpoint":
            return any(checkpoint_root(self.run_dir).glob(unpublished_name(0).replace("0", "*")))
        if moment == "evaluation":
            actor = self.job("actor_0")
            return actor is not None and bool(actor.fields.get("evaluating")) and self.evaluated_version() >= step
        return True

    def evaluated_version(self) -> int:
        """The version that the newest evaluation is of. -1: none has begun."""
        found = EVALUATION_STARTED.findall((self.run_dir / "actor_0" / "log.txt").read_text())
        return int(found[-1]) if found else -1

    def look(self) -> bool:
        """Note what the run's processes use, to see at the end that nothing of it is left. False if none was seen."""
        for status in read_statuses(self.run_dir).values():
            environment = process_environment(status.pid)
            if token := environment.get(RUN_VARIABLE):
                self.marks.add(f"{RUN_VARIABLE}={token}")
                self.paths |= {environment["TMPDIR"]} if "TMPDIR" in environment else set()
        for mark in self.marks:
            self.paths |= shared_memory_of(marked_processes(mark))
        return bool(self.marks)

    def strike(self, strike: Strike, watchers: ThreadPoolExecutor) -> Future[Blow] | None:
        """Wait for the moment, strike, have the job's next progress watched; None when the run ended before."""
        self.wait_for(lambda: self.has_made(strike.step), WATCH_S)
        if strike.moment == "resume":
            self.kill_launcher()
            self.launch()
        poll_s = POLL_S if strike.moment == "summary" else WATCH_S
        self.wait_for(lambda: self.has_come(strike.moment, strike.step), poll_s)
        if strike.job in AROUND:
            return self.strike_around(strike, watchers)
        find = self.starting if strike.moment in ("startup", "resume") else self.live
        found = [self.wait_for(lambda name=name: find(name)) for name in strike.job.split("+")]
        if None in found:
            return None
        self.look()
        time.sleep(strike.delay_s)
        struck = time.time()
        for status, pids in filter(None, found):
            children = [pid for pid in pids if pid != status.pid]
            hit = children[-1:] if strike.child and children else pids if strike.action == "freeze" else [status.pid]
            signal_all(hit, signal.SIGKILL if strike.action == "kill" else signal.SIGSTOP)
            if strike.thaw_s is not None:
                time.sleep(strike.thaw_s)
                signal_all(hit, signal.SIGCONT)
        return watchers.submit(self.await_progress, found[0][0], strike, struck)  # type: ignore[index]

    def strike_around(self, strike: Strike, watchers: ThreadPoolExecutor) -> Future[Blow] | None:
        """Strike what is not a job. The launcher is started again at once."""
        if not self.is_going():
            return None
        self.look()
        time.sleep(strike.delay_s)
        struck = time.time()
        AROUND[strike.job](self, strike.thaw_s or WHILE_S)
        return watchers.submit(self.await_steps, strike, struck)

    def kill_launcher(self) -> None:
        self.look()
        self.launcher.kill()
        self.launcher.wait()

    def restart_launcher(self) -> None:
        self.kill_launcher()
        self.launch()

    def ask_redis(self, act: Callable[[redis.Redis], object], seconds: float = 0.0) -> None:
        """Do something to the run's redis server, and wait until it is over."""
        status, port = self.wait_for(lambda: self.job("redis_0")), WorldMap.load(self.run_dir).job("redis_0").port
        assert status is not None
        until = time.time() + seconds
        password = redis_password(process_environment(status.pid))
        with redis.Redis(port=port, password=password, socket_timeout=seconds + 30) as client:
            act(client)
        time.sleep(max(0.0, until - time.time()))

    def await_steps(self, strike: Strike, struck: float) -> Blow:
        """Watch until the trainer has made another step, or the run ends."""
        step = self._last_step
        made = self.wait_for(lambda: self.has_made(step + 1))
        return Blow(strike=strike, time=struck, recovery_s=time.time() - struck if made else None)

    def await_progress(self, before: StatusRecord, strike: Strike, struck: float) -> Blow:
        """Watch until the (first) job moves again, its new process or the one it had, or the run ends."""
        job = strike.job.split("+")[0]
        kept = strike.thaw_s is not None or (strike.child and job.startswith(("actor_0", "verifier")))
        since = struck + (strike.thaw_s or 0.0)

        def moved() -> StatusRecord | None:
            now = self.job(job)
            return now if now and now.progress_at > since and (kept or now.pid != before.pid) else None

        now = self.wait_for(moved)
        return Blow(strike=strike, time=struck, recovery_s=now.progress_at - struck if now else None)

    def end(self) -> int:
        """Wait for the end; a run that does not end is interrupted as by Ctrl-C."""
        try:
            code = self.launcher.wait(max(self._deadline - time.time(), 1.0))
            while code and self.launches < MAX_LAUNCHES and time.time() < self._deadline:
                self.launch()
                code = self.launcher.wait(max(self._deadline - time.time(), 1.0))
            return code
        except subprocess.TimeoutExpired:
            return -1
        finally:
            stop(self.launcher)


def fill_redis(client: redis.Redis, seconds: float) -> None:
    client.config_set("maxmemory", 2**20)
    time.sleep(seconds)
    client.config_set("maxmemory", 0)


def put_redis_to_sleep(client: redis.Redis, seconds: float) -> None:
    """A script counts for about so long. DEBUG SLEEP is refused by the run's server."""
    client.config_set("busy-reply-threshold", 0)
    count, started = "for i = 1, ARGV[1] do end", time.monotonic()
    client.eval(count, 0, 10**8)
    client.eval(count, 0, int(10**8 * seconds / (time.monotonic() - started)))


AROUND: dict[str, Callable[[StruckRun, float], object]] = {
    "launcher": lambda run, _: run.restart_launcher(),
    "reaper": lambda run, _: signal_all(reapers_of(run.launcher.pid), signal.SIGKILL),
    "disk": lambda run, seconds: fill(run.run_dir, seconds),
    "writes": lambda run, seconds: freeze_writes(run.run_dir, seconds),
    "clock": lambda run, _: run.clock.touch(),
    "domain": lambda run, _: misbehaviour_of(run.run_dir).mkdir(),
    "redis-paused": lambda run, seconds: run.ask_redis(
        lambda it: it.client_pause(int(seconds * 1e3), all=True), seconds
    ),
    "redis-cut": lambda run, _: run.ask_redis(lambda it: it.execute_command("CLIENT", "KILL", "TYPE", "normal")),
    "redis-full": lambda run, seconds: run.ask_redis(lambda it: fill_redis(it, seconds)),
    "redis-asleep": lambda run, seconds: run.ask_redis(lambda it: put_redis_to_sleep(it, seconds)),
}
"""What is struck besides jobs, and how, for so many seconds: the disk is full, writes to it wait, the clock is an hour
back, the domain misbehaves (`misbehaving`), redis does not answer."""


def run_struck(
    run_dir: Path,
    strikes: Sequence[Strike],
    overrides: Sequence[str] = (),
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    timeout_s: float = 900.0,
) -> Outcome:
    """Run the quickstart in ``run_dir``, make the strikes in their order, wait for its end and check everything.

    A run that ends with another exit code than 0 is started again, at most until ``MAX_LAUNCHES``.
    """
    jobs = {strike.job for strike in strikes}
    with own_disk(run_dir, freezable="writes" in jobs) if jobs & {"disk", "writes"} else contextlib.nullcontext():
        run = StruckRun(run_dir, overrides, steps, timeout_s, batch=batch, misled="clock" in jobs)
        return _run_struck(run, strikes)


def _run_struck(run: StruckRun, strikes: Sequence[Strike]) -> Outcome:
    made: dict[Strike, Future[Blow] | None] = {}
    try:
        with ThreadPoolExecutor() as watchers:
            if not any(strike.moment == "startup" for strike in strikes):
                run.wait_for(run.look)  # a resumed run that was at its end makes no further step
                run.wait_for(lambda: run.has_made(1))
            run.look()
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
        launches=run.launches,
    )
    check(run, outcome)
    return outcome


def reapers_of(launcher: int) -> list[int]:
    children = psutil.Process(launcher).children()
    return [child.pid for child in children if any(part.endswith("launcher/reaper.py") for part in child.cmdline())]


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
    if misbehaviour_of(run.run_dir).exists() and len(os.listdir(misbehaviour_of(run.run_dir))) < len(WAYS):
        problems.append(f"the domain misbehaved only in these ways: {sorted(os.listdir(misbehaviour_of(run.run_dir)))}")
    if outcome.exit_code != 0:
        problems.append(f"exit code {outcome.exit_code}")
    book = ledger.read_ledger(run.run_dir)
    outcome.samples = dict(sorted(book.counts().items()))
    problems += book.violations
    if outcome.samples.get("trained") != run.steps * run.batch:
        problems.append(f"{outcome.samples.get('trained')} samples trained instead of {run.steps * run.batch}")
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
    found = [f"process {pid} is left" for mark in run.marks for pid in marked_processes(mark)]
    found += [] if run.marks else ["no process was seen"]
    for job in WorldMap.load(run.run_dir).jobs:
        if job.port is not None:
            with contextlib.suppress(OSError), socket.create_connection((job.hostname, job.port), timeout=1):
                found.append(f"port {job.port} of {job.name} still listens")
    found += [f"{path} is left" for path in run.paths if path != tempfile.gettempdir() and os.path.exists(path)]
    return found + [f"{path.name} is left" for path in checkpoint_root(run.run_dir).glob(".step_*")]
