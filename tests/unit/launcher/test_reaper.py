"""Marked processes are found and ended whatever they did to get away; strangers are left alone."""

import asyncio
import contextlib
import fcntl
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import processes, reaper, run_dir
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.local import LocalEngine, Running
from pipelinerl.launcher.processes import Host, Reaper, RunMark, describe_exit, pinned, wait_for_exit
from pipelinerl.launcher.trial import TrialError, TrialTimeoutError, run_trial
from pipelinerl.observability.status import STATUS_DIR
from pipelinerl.world.process import kept
from tests.escapes import ESCAPES, escape, is_alive
from tests.waiting import wait_until

SLEEP = "import time; time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
)
FORKING = (
    "import subprocess, sys, time\n"
    f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)\n"
    "print('ready', flush=True); time.sleep(600)"
)


def start(code: str, mark: RunMark | None, job: str = "job_0") -> subprocess.Popen[str]:
    environment = {**os.environ, **(mark.variables(job) if mark else {})}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    if "ready" in code:
        assert process.stdout is not None
        process.stdout.readline()
    return process


def close(process: subprocess.Popen[str]) -> int:
    code = process.wait(timeout=60)
    assert process.stdout is not None
    process.stdout.close()
    return code


def test_sweep_ends_marked_processes_and_leaves_strangers() -> None:
    mark = RunMark()
    ours, stranger = start(FORKING, mark), start(SLEEP, None)
    assert len(reaper.marked_processes(mark.run)) == 2
    assert reaper.sweep(mark.run, grace_s=60) == 2
    assert close(ours) == -signal.SIGTERM
    assert reaper.marked_processes(mark.run) == []
    assert stranger.poll() is None
    stranger.kill()
    close(stranger)


def test_sweep_by_role_touches_no_other_role_of_the_run() -> None:
    mark = RunMark()
    process = start(SLEEP, mark)
    assert reaper.sweep(mark.role("job_1"), grace_s=0) == 0
    assert reaper.sweep(mark.role("job_0"), grace_s=0) == 1
    assert close(process) == -signal.SIGKILL


def test_sweep_kills_who_ignores_the_request() -> None:
    mark = RunMark()
    process = start(STUBBORN, mark)
    assert reaper.sweep(mark.run, grace_s=0.2) == 1
    assert close(process) == -signal.SIGKILL


@pytest.mark.parametrize("state", ["asleep", "frozen"])
@pytest.mark.parametrize("how", ESCAPES)
def test_sweep_leaves_keepers_the_time_to_end_what_carries_no_mark(how: str, state: str, tmp_path: Path) -> None:
    mark, daemon = RunMark(), tmp_path / "pid"
    line = f'trap "" TERM\n{escape(how, daemon)}\nsleep 600'
    process = subprocess.Popen(kept(["sh", "-c", line], math.inf), env={**os.environ, **mark.variables("job_0")})
    wait_until(daemon.exists)
    assert is_alive(daemon)
    if state == "frozen":
        process.send_signal(signal.SIGSTOP)
    reaper.sweep(mark.run, grace_s=0)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not is_alive(daemon)
    assert reaper.marked_processes(mark.run) == []


HOLDING = (
    "import multiprocessing, time\n"
    "from multiprocessing import shared_memory\n"
    "lock = multiprocessing.get_context('spawn').Lock()\n"
    "segment = shared_memory.SharedMemory(create=True, size=64)\n"
    "print('ready', flush=True); time.sleep(600)"
)


def test_sweep_unlinks_segments_and_semaphores_of_the_killed() -> None:
    before = set(os.listdir("/dev/shm"))
    mark = RunMark()
    process = start(HOLDING, mark)
    held = reaper.shared_memory_of([process.pid])
    assert len(held) == 2
    assert not before & {os.path.basename(path) for path in held}
    reaper.sweep(mark.run, grace_s=0)
    close(process)
    assert not any(os.path.exists(path) for path in held)


MAPPING = (
    "import mmap, time\n"
    "with open({path!r}, 'r+b') as file: segment = mmap.mmap(file.fileno(), 0)\n"
    "print('ready', flush=True); time.sleep(600)"
)


def test_segment_that_another_role_goes_on_using_stays() -> None:
    """A killed server has the trainer's segments mapped, through which the next server gets weights over CUDA IPC."""
    server, path = RunMark(), f"/dev/shm/pipelinerl-test-{os.getpid()}"
    Path(path).write_bytes(bytes(64))
    trainer, killed = (start(MAPPING.format(path=path), mark) for mark in (RunMark(), server))
    assert reaper.shared_memory_of([killed.pid]) == {path}
    reaper.sweep(server.run, grace_s=0)
    close(killed)
    assert os.path.exists(path)
    trainer.kill()
    close(trainer)
    assert reaper.sweep(server.run, grace_s=0, segments={path}) == 0
    assert not os.path.exists(path), "nobody uses it any more"


def test_segment_of_a_killed_trainer_that_its_server_unmaps_is_gone_at_the_end(tmp_path: Path) -> None:
    """Nobody has it mapped when the run ends, and the trainer, which would have removed it, was killed."""
    path, mark = f"/dev/shm/pipelinerl-test-{os.getpid()}", RunMark()
    host = Host(run_dir=tmp_path, environment={}, mark=mark)
    Path(path).write_bytes(bytes(64))
    trainer, server = (start(MAPPING.format(path=path), mark, job) for job in ("finetune_0", "actor_llm_0"))
    trainer.kill()
    close(trainer)
    host.sweep("finetune_0", grace_s=0)
    assert os.path.exists(path), "the server uses it"
    server.kill()
    close(server)
    host.sweep_all(grace_s=0, segments=())
    assert not os.path.exists(path)


@pytest.mark.parametrize(("away", "is_held"), [(0, True), (1, False)])
def test_segment_of_another_device_with_the_same_inode_is_another_one(
    monkeypatch: pytest.MonkeyPatch, away: int, is_held: bool
) -> None:
    """Another container has a device of its own under /dev/shm."""
    path = Path(f"/dev/shm/pipelinerl-test-{os.getpid()}")
    path.write_bytes(bytes(64))
    status = path.stat()
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev) + away:02x}"
    line = f"7f0000000000-7f0000001000 rw-s 00000000 {device} {status.st_ino}    {path}\n"
    monkeypatch.setattr(reaper, "open", lambda name, **_: io.StringIO(line), raising=False)
    try:
        assert reaper.shared_memory_of([1]) == ({str(path)} if is_held else set())
    finally:
        path.unlink()


def test_reaper_ends_the_run_when_its_pipe_breaks_and_not_when_dismissed() -> None:
    mark = RunMark()
    process = start(SLEEP, mark)
    Reaper(mark, grace_s=60).dismiss()
    assert process.poll() is None
    watch = Reaper(mark, grace_s=60)
    watch._pipe.close()
    assert close(process) == -signal.SIGTERM
    watch._process.wait(timeout=60)


@pytest.mark.parametrize("end", [Reaper.dismiss, lambda reaper: reaper._pipe.close()])
def test_reaper_removes_the_temporary_folder_however_the_launcher_ends(end: Callable[[Reaper], None]) -> None:
    watch = Reaper(RunMark(), grace_s=0)
    Path(watch.temporary, "left").write_text("behind")
    folder = os.open(watch.temporary, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("deeper", dir_fd=folder)
        inner = os.open("deeper", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    end(watch)
    watch._process.wait(timeout=60)
    assert not os.path.exists(watch.temporary)


async def test_reaper_that_is_killed_is_replaced_and_the_run_ends_in_order() -> None:
    watch = Reaper(RunMark(), grace_s=0)
    keeping = asyncio.create_task(watch.keep())
    first = watch._process
    first.kill()
    deadline = time.monotonic() + 60
    while watch._process is first:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    keeping.cancel()
    watch.dismiss()
    assert not os.path.exists(watch.temporary)


def test_reaper_that_is_slow_to_remove_a_large_folder_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A finished run ended in a traceback after 30 s. The reaper is stopped here in place of a slow disk."""
    monkeypatch.setattr(processes, "DISMISS_S", 0.05)
    watch = Reaper(RunMark(), grace_s=0)
    watch._process.send_signal(signal.SIGSTOP)
    watch.dismiss()
    assert f"event=temporary_large folder={watch.temporary}" in caplog.text
    watch._process.send_signal(signal.SIGCONT)
    assert watch._process.wait(timeout=60) == 0
    assert not os.path.exists(watch.temporary)


def test_reaper_killed_at_the_very_end_leaves_nothing() -> None:
    watch = Reaper(RunMark(), grace_s=0)
    watch._process.kill()
    watch._process.wait()
    watch.dismiss()
    assert not os.path.exists(watch.temporary)


def is_free(lock: Path) -> bool:
    with open(lock, "a+") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def test_folder_that_takes_longer_to_remove_ends_no_run_and_holds_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with millions of files on a network disk: the program that removes them waits for the test here."""
    may_end = tmp_path / "may_end"
    os.mkfifo(may_end)
    slow = tmp_path / "rm"
    slow.write_text(f'#!/bin/sh\nread _ < {may_end}\nexec {shutil.which("rm")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "DISMISS_S", 0.5)
    with open(tmp_path / "lock", "a+") as lock:
        run_dir.take_lock(lock, tmp_path)
        watch = Reaper(RunMark(), grace_s=0, lock=lock.fileno())
        watch.dismiss()
        assert os.path.exists(watch.temporary)
    wait_until(lambda: is_free(tmp_path / "lock"), 60)
    may_end.write_text("\n")
    assert watch._process.wait(timeout=60) == 0
    assert not os.path.exists(watch.temporary)


def test_run_folder_of_a_killed_launcher_is_free_when_its_reaper_is_done(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.local import LocalEngine, Running
from pipelinerl.launcher.processes import Host, Reaper, RunMark
from pipelinerl.launcher import run_dir
path = Path({str(tmp_path)!r})
lock = open(path / "lock", "a+")
run_dir.take_lock(lock, path)
mark = RunMark()
reaper = Reaper(mark, grace_s=0.2, lock=lock.fileno())
import subprocess
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(100)"
child = subprocess.Popen([sys.executable, "-c", stubborn], env={{**os.environ, **mark.variables("role")}}, stdout=-1)
child.stdout.readline()
os.kill(reaper._process.pid, signal.SIGSTOP)
print(child.pid, reaper._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    launcher = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False)
    child, its_reaper = map(int, launcher.stdout.split())
    with open(tmp_path / "lock", "a+") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.kill(its_reaper, signal.SIGCONT)
        run_dir.take_lock(lock, tmp_path)
        assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_run_folder_of_a_living_launcher_is_refused_at_once(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "a+") as ours, open(tmp_path / "lock", "a+") as theirs:
        run_dir.take_lock(ours, tmp_path)
        with pytest.raises(ConfigError, match="another launcher is running in it"):
            run_dir.take_lock(theirs, tmp_path)


def test_trial_deadline_ends_all_that_it_started() -> None:
    started = time.monotonic()
    with pytest.raises(TrialTimeoutError, match="has not ended after 1 s"):
        run_trial("-c", FORKING, timeout_s=1.0)
    assert time.monotonic() - started < 60


def test_trial_answers_its_job_whatever_else_it_prints() -> None:
    code = (
        "from pipelinerl.launcher.trial import answer\nanswer(lambda job: (print('noise'), {'twice': 2 * job['n']})[1])"
    )
    assert run_trial("-c", code, job={"n": 4}, timeout_s=120) == {"twice": 8}


@pytest.mark.parametrize(
    ("code", "how", "last"),
    [
        ("import sys; print(1); print('e', file=sys.stderr); sys.exit(3)", "exit code 3", "e"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", "no message"),
        ("pass", "exit code 0", "no message"),
    ],
)
def test_trial_without_an_answer_says_how_it_ended(code: str, how: str, last: str) -> None:
    with pytest.raises(TrialError) as error:
        run_trial("-c", code, timeout_s=120)
    assert (error.value.how, str(error.value)) == (how, last)


async def test_wait_for_exit_returns_the_code() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(5)"])  # noqa: ASYNC220
    assert await wait_for_exit(process) == 5
    assert await wait_for_exit(process) == 5


def test_pinned_child_gets_the_cores_and_the_caller_keeps_its_own(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    with pinned((core,)):
        shown = subprocess.check_output([sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], text=True)
    assert shown.strip() == f"{{{core}}}"
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_describe_exit_names_signals(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_sweep_unlinks_what_processes_used_that_have_ended_themselves() -> None:
    with open(f"/dev/shm/pipelinerl-test-{os.getpid()}", "wb") as segment:
        segment.write(b"x")
    assert reaper.sweep(RunMark().run, grace_s=0, segments={segment.name}) == 0
    assert not os.path.exists(segment.name)


def test_folder_of_a_launcher_that_was_killed_with_its_reaper_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, neighbour = [Reaper(RunMark(), grace_s=0, owner=f"/results/run node {rank}") for rank in range(2)]
    (tmp_path / "prl-of-nobody").mkdir()
    (tmp_path / "prl-link").symlink_to(killed.temporary)
    Path(killed.temporary, "sandbox").mkdir()
    killed._process.kill()
    killed._process.wait()
    assert os.path.exists(killed.temporary), "as after a power cut, or when all processes are killed at once"
    resumed = Reaper(RunMark(), grace_s=0, owner="/results/run node 0")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {Path(resumed.temporary).name, Path(neighbour.temporary).name, "prl-of-nobody", "prl-link"}
    for each in (resumed, neighbour, killed):
        each.dismiss()


def test_stop_signals_the_ranks_of_this_run_and_no_stranger_whose_number_a_status_file_names(tmp_path: Path) -> None:
    """Files of another node's ranks, or of a process that is gone, hold numbers that others have here."""
    mark = RunMark()
    host = Host(run_dir=tmp_path, environment={}, mark=mark)
    role, rank = (start(SLEEP, mark, "finetune_0") for _ in range(2))
    other, stranger = start(SLEEP, mark, "actor_0"), start(SLEEP, None)
    names = ["finetune_0", "finetune_0.rank1", "finetune_0.rank8", "finetune_0.rank9"]
    for name, process in zip(names, (role, rank, other, stranger), strict=True):
        times = dict.fromkeys(("started", "heartbeat", "progress_at", "progress_count"), 0)
        fields = {"job": name, "state": "running", "pid": process.pid, "hostname": "h", "waits": [], "fields": {}}
        (tmp_path / STATUS_DIR).mkdir(exist_ok=True)
        (tmp_path / STATUS_DIR / f"{name}.json").write_text(json.dumps(times | fields))
    try:
        assert sorted(host.ranks_of("finetune_0")) == sorted([role.pid, rank.pid])
        limits = parse(compose("quickstart", [f"output_dir={tmp_path}"])).launcher
        engine = LocalEngine(host, ["finetune_0"], limits, print)
        command = RoleCommand(name="finetune_0", kind="finetune", argv=(), env={}, cores=())
        engine._running["finetune_0"] = Running(command, role, 0.0)
        assert engine.stop_kinds(["finetune"], 60, may_save=False) == []
        assert [close(role), close(rank)] == [-signal.SIGTERM] * 2
        assert [other.poll(), stranger.poll()] == [None, None]
    finally:
        for process in (role, rank, other, stranger):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
