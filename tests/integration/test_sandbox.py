"""Hostile programs in the embedded sandbox: contained, judged, cleaned up."""

import asyncio
import os
import tempfile
from pathlib import Path

import psutil
import pytest

from pipelinerl.domains.coding.judge import TestSuite, judge
from pipelinerl.errors import VerifierError
from pipelinerl.sandbox import Limits, Outcome, Sandbox
from pipelinerl.sandbox.inside.kernel import seccomp_program
from pipelinerl.sandbox.modes import MODES
from pipelinerl.sandbox.runner import remove_tree

LIMITS = Limits(cpu_s=2, wall_s=10.0, total_s=30.0, memory_mb=512, disk_mb=16, processes=16, output_kb=256)


async def usable_modes() -> list[str]:
    """The ways of isolation that this machine allows."""
    usable = []
    for mode in MODES:
        try:
            (outcome,) = await Sandbox(limits=LIMITS, mode=mode).run_python("print(1)", [""])
        except (VerifierError, FileNotFoundError):
            continue
        if outcome.stdout == "1\n":
            usable.append(mode)
    return usable


@pytest.fixture(scope="module", params=asyncio.run(usable_modes()))
def sandbox(request) -> Sandbox:
    return Sandbox(limits=LIMITS, mode=request.param)


async def run(sandbox: Sandbox, code: str, stdin: str = "") -> Outcome:
    """Runs one program and checks that nothing of it is left."""
    folders = set(Path(tempfile.gettempdir()).glob("pipelinerl-sandbox-*"))
    (outcome,) = await sandbox.run_python(code, [stdin])
    assert set(Path(tempfile.gettempdir()).glob("pipelinerl-sandbox-*")) <= folders
    assert not [p for p in psutil.process_iter() if is_left_over(p)]
    return outcome


def is_left_over(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "solution.py" in process.cmdline()
    except psutil.Error:
        return False


def test_this_machine_allows_some_isolation():
    assert asyncio.run(usable_modes()), "install bubblewrap or allow user namespaces"


async def test_program_reads_input_writes_output_and_ends(sandbox):
    outcome = await run(sandbox, "print(input()[::-1]); import sys; sys.exit(3)", "abc\n")
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == ("exited", 3, "cba\n")


async def test_runs_of_one_program_are_separate(sandbox):
    code = "import os; print(input(), os.path.exists('mark')); open('mark', 'w')"
    outcomes = await sandbox.run_python(code, ["1", "2"])
    assert [o.stdout.split()[0] for o in outcomes] == ["1", "2"]


async def test_infinite_loop_is_ended_by_its_cpu_time(sandbox):
    outcome = await run(sandbox, "while True: pass")
    assert outcome.ended == "time"


async def test_sleep_is_ended_by_the_wall_clock():
    sandbox = Sandbox(limits=Limits(wall_s=1.0))
    assert (await run(sandbox, "import time; time.sleep(600)")).ended == "time"


async def test_fork_bomb_is_ended_with_all_its_processes(sandbox):
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert (await run(sandbox, code)).ended == "time"


async def test_ten_gigabytes_cannot_be_allocated(sandbox):
    outcome = await run(sandbox, "x = bytearray(10 * 2**30); print('got it')")
    assert outcome.stdout == ""
    assert "MemoryError" in outcome.stderr


async def test_memory_of_all_processes_together_is_limited(sandbox):
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = bytearray(os.urandom(1)) * (300 * 2**20)
        time.sleep(60)
time.sleep(60)
"""
    assert (await run(sandbox, code)).ended == "memory"


async def test_files_outside_are_neither_written_nor_read(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("the run's secret")
    targets = [str(tmp_path / "new"), "/etc/new", "/usr/new", "/var/tmp/new", "/dev/shm/new", str(Path.home() / "new")]
    code = f"""
for path in {targets!r}:
    try:
        open(path, "w").write("x"); print("WROTE", path)
    except OSError:
        pass
for path in {[str(secret), str(Path.cwd() / "pyproject.toml"), "/etc/shadow", "/proc/1/environ", "/proc/1/mem"]!r}:
    try:
        print("READ", path, len(open(path, "rb").read(10)))
    except OSError:
        pass
"""
    outcome = await run(sandbox, code)
    assert (outcome.stdout, outcome.stderr) == ("", "")
    assert not any(os.path.exists(target) for target in targets)


async def test_environment_holds_no_secret(sandbox, monkeypatch):
    monkeypatch.setenv("PIPELINERL_SECRET", "s3cret")
    code = """
import os
print(dict(os.environ))
for name in os.listdir("/proc") if os.access("/proc", os.R_OK) else []:
    if name.isdigit():
        try: print(open(f"/proc/{name}/environ").read())
        except OSError: pass
"""
    outcome = await run(sandbox, code)
    assert "PATH" in outcome.stdout
    assert "s3cret" not in outcome.stdout


async def test_no_socket_of_any_family_opens(sandbox):
    code = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    try: socket.socket(family); print("OPEN", family)
    except OSError: pass
a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1))
"""
    outcome = await run(sandbox, code)
    assert outcome.stdout == "b'x'\n"


async def test_detached_and_zombie_children_are_ended(sandbox):
    code = """
import os, time
for i in range(5):
    if os.fork() == 0: os._exit(0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2): os.close(descriptor)
        time.sleep(600)
    os._exit(0)
print("done")
"""
    outcome = await run(sandbox, code)
    assert (outcome.ended, outcome.stdout) == ("exited", "done\n")


async def test_hundred_megabytes_of_output_are_cut(sandbox):
    outcome = await run(sandbox, "import sys\nfor _ in range(1000): sys.stdout.write('x' * 100_000)")
    assert outcome.ended == "output"
    assert len(outcome.stdout) == 256 * 1024
    errors = await run(sandbox, "import sys\nfor _ in range(1000): sys.stderr.write('x' * 100_000)\nprint('end')")
    assert (errors.ended, errors.stdout) == ("exited", "end\n")
    assert len(errors.stderr) <= 8192


async def test_disk_is_limited(sandbox):
    code = "for i in range(100):\n  open(f'big{i}', 'wb').write(b'0' * 2**20)"
    outcome = await run(sandbox, code)
    assert outcome.ended == "disk" or "No space left" in outcome.stderr


async def test_folders_deeper_than_a_path_are_judged_and_removed(sandbox):
    dig = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('dug')"
    outcome = await run(sandbox, dig)
    assert (outcome.ended, outcome.stdout) == ("exited", "dug\n")


async def test_tree_of_any_depth_is_removed(tmp_path):
    root, home = tmp_path / "root", os.open(".", os.O_PATH)
    try:
        for folder in [root, *["d"] * 3000]:
            os.mkdir(folder)
            os.chdir(folder)
    finally:
        os.fchdir(home)
        os.close(home)
    await remove_tree(str(root))
    assert not root.exists()


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.memfd_create('x')",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.shmget(0, 4096, 0o1666) >= 0",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.msgget(0, 0o1666) >= 0",
    ],
    ids=["memfd", "shared segment", "message queue"],
)
async def test_memory_that_no_limit_counts_is_not_to_be_had(sandbox, code):
    outcome = await run(sandbox, code)
    assert (outcome.ended, outcome.exit_code) == ("exited", 1)


async def test_program_cannot_end_its_supervisor(sandbox):
    code = """
import os, signal
for target in (1, os.getppid(), -1):
    if target != -1 or os.getpid() > 1:
        try: os.kill(target, signal.SIGKILL)
        except OSError: pass
print("still judged")
"""
    (outcome,) = await sandbox.run_python(code, [""])
    assert outcome.ended in ("exited", "signal")


async def test_crash_is_an_outcome(sandbox):
    outcome = await run(sandbox, "import ctypes; ctypes.string_at(0)")
    assert outcome.ended == "signal"


async def test_run_that_did_not_end_well_is_the_last(sandbox):
    code = "import sys\nif input() == '2': sys.stdout.write('x' * 10**6)\nprint('ok')"
    outcomes = await sandbox.run_python(code, ["1", "2", "3"])
    assert [o.ended for o in outcomes] == ["exited", "output"]


def test_filter_jumps_land_on_its_last_two_instructions():
    for machine in ("x86_64", "aarch64"):
        for signals in (True, False):
            program = seccomp_program(machine, signals=signals)
            for index, (code, true, _, _) in enumerate(program[6:-2], start=6):
                assert code == 0x15
                assert index + 1 + true == len(program) - 1, "a denied call reaches the last instruction"


async def test_two_hundred_concurrent_judgements_lose_none():
    sandbox = Sandbox(limits=LIMITS, concurrency=2)
    suite = TestSuite.from_problem({"inputs": ["3\n"], "outputs": ["9\n"]})
    programs = [f"print(int(input()) * {3 if i % 2 else 4})" for i in range(200)]
    verdicts = await asyncio.gather(*(judge(f"```python\n{code}\n```", suite, sandbox) for code in programs))
    assert [v.status for v in verdicts] == ["wrong", "correct"] * 100
