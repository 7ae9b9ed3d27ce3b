"""Hostile programs in the embedded sandbox: contained, judged, cleaned up."""

import asyncio
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipelinerl.domains.coding.judge import TestSuite, judge
from pipelinerl.domains.sandbox import Limits, Outcome, Sandbox
from pipelinerl.domains.sandbox.runner import MODES, Jail
from pipelinerl.errors import VerifierError

LIMITS = Limits(cpu_s=2, wall_s=60.0, total_s=120.0, memory_mb=512, disk_mb=16, processes=16, output_kb=256)


OURS: set[tuple[str, ...]] = set()
"""Command lines of this process's jails, each with a user of its own. Other tests run jails at the same time."""


def usable_modes() -> list[str]:
    """The ways of isolation that this machine allows."""
    usable = []
    for mode in MODES:
        try:
            Jail(mode).close()
        except VerifierError:
            continue
        usable.append(mode)
    return usable


@pytest.fixture(scope="module", autouse=True)
def jails_are_known() -> Iterator[None]:
    start = Jail.__init__

    def start_and_note(jail: Jail, mode: str) -> None:
        start(jail, mode)
        OURS.add(tuple(jail._process.args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Jail, "__init__", start_and_note)
        yield


@contextmanager
def warm_sandbox(limits: Limits, mode: str) -> Iterator[Sandbox]:
    """A sandbox that has run a program."""
    sandbox = Sandbox(limits=limits, mode=mode)
    asyncio.run(sandbox.run_python("pass", [""]))
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module", params=usable_modes())
def sandbox(request) -> Iterator[Sandbox]:
    with warm_sandbox(LIMITS, request.param) as sandbox:
        yield sandbox


async def run(sandbox: Sandbox, code: str, stdin: str = "") -> Outcome:
    """Runs one program and checks that nothing of it is left."""
    before = {process.pid for process in psutil.process_iter()}
    (outcome,) = await sandbox.run_python(code, [stdin])
    deadline = time.monotonic() + 60
    while left := [process for process in psutil.process_iter() if process.pid not in before and is_jailed(process)]:
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.01)
    return outcome


def is_jailed(process: psutil.Process) -> bool:
    """Whether it was forked for a program of ours: its jail's command line in a PID namespace of its own."""
    try:
        levels = Path(f"/proc/{process.pid}/status").read_text().partition("NSpid:")[2].splitlines()[0].split()
        return len(levels) > 1 and tuple(process.cmdline()) in OURS
    except (psutil.Error, OSError, IndexError):
        return False


def test_this_machine_allows_some_isolation():
    assert usable_modes(), "run as root or allow user namespaces"


async def test_program_reads_input_writes_output_and_ends(sandbox):
    outcome = await run(sandbox, "print(input()[::-1]); import sys; sys.exit(3)", "abc\n")
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == ("exited", 3, "cba\n")


async def test_runs_of_one_program_are_separate(sandbox):
    """Neither a file nor a process nor anything in the interpreter of one is there in the next."""
    code = """
import os, sys, time
print(input(), [os.path.exists(f"{folder}/mark") for folder in (".", "/tmp")], hasattr(os, "mark"))
open("mark", "w"); open("/tmp/mark", "w"); os.mark = 1
if os.fork() == 0: time.sleep(60)
"""
    outcomes = await sandbox.run_python(code, ["1", "2"])
    assert [outcome.stdout for outcome in outcomes] == ["1 [False, False] False\n", "2 [False, False] False\n"]


async def test_run_finds_no_other_input_and_no_earlier_output_in_its_interpreter(sandbox):
    """It searches all frames and all objects."""
    words = [f"{word}-{'x' * 40}" for word in ("first", "second", "third")]
    code = """
import gc, sys
mine, seen, tail = input(), set(), "x" * int("40")
def look(text):
    for word in ("first", "second", "third", "heard"):
        if f"{word}-{tail}" in text and not mine.startswith(word): seen.add(word)
frame = sys._getframe()
while frame:
    look(repr(frame.f_locals)); frame = frame.f_back
for found in gc.get_objects():
    if isinstance(found, (dict, list, tuple)):
        for value in list(found.values() if isinstance(found, dict) else found):
            if isinstance(value, (str, bytes, bytearray)): look(str(value)[:10**6])
print(f"heard-{tail}", sorted(seen))
"""
    outcomes = await sandbox.run_python(code, words)
    assert [outcome.stdout.split(" ", 1)[1] for outcome in outcomes] == ["[]\n"] * 3, outcomes


async def test_program_that_was_not_confined_has_no_exit_code(sandbox):
    impossible = Sandbox(limits=replace(LIMITS, cpu_s=2**70), mode=sandbox.mode)
    outcome = await run(impossible, "print(1)")
    impossible.close()
    assert (outcome.ended, outcome.stdout) == ("signal", "")
    assert "the sandbox: OverflowError" in outcome.stderr


async def test_lower_limits_of_the_machine_hold(sandbox, monkeypatch):
    lower = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (100, 100))
    monkeypatch.setattr("subprocess.Popen", partial(subprocess.Popen, preexec_fn=lower))
    limited = Sandbox(limits=LIMITS, mode=sandbox.mode)
    outcome = await run(limited, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    limited.close()
    assert outcome.stdout == "(100, 100)\n"


async def test_each_run_has_its_own_network_and_process_numbers(sandbox):
    """Two programs at once: their namespaces are neither each other's nor the jail's."""
    sandboxes = Sandbox(limits=LIMITS, mode=sandbox.mode, concurrency=2)
    code = "import time; time.sleep(60)"
    running = [asyncio.create_task(sandboxes.run_python(code, [""])) for _ in range(2)]
    await jailed_processes(4)  # two times init and the program
    jail = (await sandboxes._started())._process.pid
    jailed = [process.pid for process in psutil.process_iter() if is_jailed(process)]
    for kind in ("net", "pid", "mnt"):
        spaces = [os.readlink(f"/proc/{pid}/ns/{kind}") for pid in (jail, *jailed)]
        assert len(set(spaces)) == 3, (kind, spaces)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await jailed_processes(0)
    sandboxes.close()


async def test_fork_bomb_takes_no_process_from_its_neighbour():
    """The bomb holds all of its processes while the neighbour starts five, again and again."""
    bomb = """
import os, time
while True:
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: time.sleep(0.001)
"""
    honest = """
import os
children = []
for i in range(5):
    child = os.fork()
    if child == 0: os._exit(i)
    children.append(child)
print(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""
    limits = replace(LIMITS, cpu_s=60)  # the bombs last until they are cancelled
    for mode in usable_modes():
        sandbox = Sandbox(limits=limits, mode=mode, concurrency=4)
        bombs = [asyncio.create_task(sandbox.run_python(bomb, [""])) for _ in range(3)]
        await jailed_processes(3 * (LIMITS.processes + 1))
        outcomes = [(await sandbox.run_python(honest, [""]))[0].stdout for _ in range(5)]
        for task in bombs:
            task.cancel()
        await asyncio.gather(*bombs, return_exceptions=True)
        await jailed_processes(0)
        sandbox.close()
        assert outcomes == ["10\n"] * 5, mode


async def test_threads_of_one_run_weigh_together_as_one(sandbox):
    """Sixteen busy processes, in sessions of their own. With the niceness of each they have the share of one."""
    code = """
import os
start = os.getpriority(os.PRIO_PROCESS, 0)
if {busy}:
    for _ in range(15):
        if os.fork() == 0:
            os.setsid()
            while True: pass
used = os.times().user
while os.getpriority(os.PRIO_PROCESS, 0) == start and os.times().user < used + {seconds}: pass
print(os.getpriority(os.PRIO_PROCESS, 0) > start)
"""
    alone = Sandbox(limits=replace(LIMITS, cpu_s=20, wall_s=120.0), mode=sandbox.mode, concurrency=1)
    (bomb,) = await alone.run_python(code.format(busy=True, seconds=15), [""])
    (single,) = await alone.run_python(code.format(busy=False, seconds=0.3), [""])
    alone.close()
    assert (bomb.stdout, single.stdout) == ("True\n", "False\n")


@pytest.mark.parametrize("holder", ["socketpair", "page tables"])
async def test_kernel_memory_counts_as_the_programs(holder, sandbox):
    """Eight processes hold 200 MB in sockets, or one 320 MB in page tables. A quarter of the limit is resident."""
    small = Sandbox(
        limits=Limits(cpu_s=20, wall_s=120.0, memory_mb=200, processes=64, disk_mb=1), mode=sandbox.mode, concurrency=1
    )
    code = f"""
import ctypes, os, socket, time
def hold():
    held = []
    try:
        while True:
            pair = socket.socketpair(); held.append(pair)
            for end in pair:
                end.setblocking(False)
                try:
                    while end.send(bytes(1 << 16)): pass
                except BlockingIOError: pass
    except OSError: pass
    return held
def tables():
    libc = ctypes.CDLL(None); libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    for i in range(40_000):
        page = libc.mmap(0x100000000000 + i * (1 << 30), 4096, 1, 0x32, -1, 0)
        ctypes.string_at(page, 1)
for _ in range(1 if {holder!r} == "page tables" else 8):
    if os.fork() == 0:
        held = tables() if {holder!r} == "page tables" else hold()
        time.sleep(600)
time.sleep(600)
"""
    (outcome,) = await small.run_python(code, [""])
    small.close()
    assert outcome.ended == "memory", outcome


async def test_infinite_loop_is_ended_by_its_cpu_time(sandbox):
    outcome = await run(sandbox, "while True: pass")
    assert outcome.ended == "time"


async def test_sleep_is_ended_by_the_wall_clock():
    sandbox = Sandbox(limits=Limits(wall_s=1.0))
    assert (await run(sandbox, "import time; time.sleep(600)")).ended == "time"
    sandbox.close()


@pytest.mark.parametrize("mode", usable_modes())
async def test_fork_bomb_is_ended_with_all_its_processes(mode):
    """Each of them computes for all the time that a process has."""
    sandbox = Sandbox(limits=replace(LIMITS, cpu_s=1, processes=3), mode=mode)
    code = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    assert (await run(sandbox, code)).ended == "time"
    sandbox.close()


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
    assert outcome.exit_code == 1
    assert "No space left" in outcome.stderr


async def test_folders_deeper_than_a_path_are_judged(sandbox):
    dig = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\nprint('dug')"
    outcome = await run(sandbox, dig)
    assert (outcome.ended, outcome.stdout) == ("exited", "dug\n")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.memfd_create('x')",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.shmget(0, 4096, 0o1666) >= 0",
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.msgget(0, 0o1666) >= 0",
    ],
    ids=["memfd", "shared segment", "message queue"],
)
async def test_memory_outside_all_limits_is_denied(sandbox, code):
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


async def test_two_hundred_concurrent_judgements_lose_none():
    sandbox = Sandbox(limits=LIMITS, concurrency=2)
    suite = TestSuite.from_problem({"inputs": ["3\n"], "outputs": ["9\n"]})
    programs = [f"print(int(input()) * {3 if i % 2 else 4})" for i in range(200)]
    verdicts = await asyncio.gather(*(judge(f"```python\n{code}\n```", suite, sandbox) for code in programs))
    assert [v.status for v in verdicts] == ["wrong", "correct"] * 100
    sandbox.close()


async def test_calls_and_assertions_are_judged_in_the_sandbox(sandbox):
    calls = TestSuite.from_problem({"inputs": [[[1, 2]]], "outputs": [[1.5]], "fn_name": "f"})
    code = "class Solution:\n    def f(self, numbers: List[int]): return np.mean(np.array(numbers))"
    assert (await judge(f"```python\n{code}\n```", calls, sandbox)).status == "correct"
    asserts = TestSuite.from_problem({"asserts": ["assert f(2) == {(2,): 4}", "assert f(0) is None"], "fn_name": "f"})
    code = "def f(x): return {(x,): x * x}"
    verdict = await judge(f"```python\n{code}\n```", asserts, sandbox)
    assert (verdict.status, verdict.score) == ("wrong", 0.5)


async def test_integer_of_many_digits_has_the_time_of_any_other_program(sandbox):
    suite = TestSuite.from_problem({"inputs": ["6000", "9000000"], "outputs": ["9" * 6000, "9"], "fn_name": None})
    verdict = await judge("```python\nprint(10 ** int(input()) - 1)\n```", suite, sandbox)
    assert (verdict.status, verdict.score) == ("wrong", 0.5)


async def test_jail_that_died_is_replaced(sandbox):
    mortal = Sandbox(limits=LIMITS, mode=sandbox.mode)
    jail = await mortal._started()
    jail._process.kill()
    jail._process.wait()
    assert (await run(mortal, "print('again')")).stdout == "again\n"
    mortal.close()


async def jailed_processes(count: int) -> None:
    """Waits until so many processes run for programs."""
    deadline = time.monotonic() + 60
    while sum(map(is_jailed, psutil.process_iter())) != count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_supervisor_that_dies_while_a_program_runs_is_a_failed_run(sandbox):
    running = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)", [""]))
    await jailed_processes(2)  # init and the program
    (supervisor,) = psutil.Process((await sandbox._started())._process.pid).children()
    supervisor.kill()
    assert [outcome.ended for outcome in await running] == ["signal"]
    await jailed_processes(0)


async def test_cancelled_program_leaves_no_process(sandbox):
    running = asyncio.create_task(sandbox.run_python("import time; time.sleep(60)", [""]))
    await jailed_processes(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await jailed_processes(0)


@pytest.mark.parametrize("mode", ["bwrap", "landlock", "none"])
def test_mode_without_isolation_is_refused(mode):
    with pytest.raises(ValueError, match="'root' or 'user'"):
        Sandbox(mode=mode)


async def test_program_finds_what_a_script_finds(sandbox):
    """The jail prepares the streams for all programs, and collects no garbage itself."""
    code = """
import gc, os, random, sys
class Node: pass
for _ in range(10_000):
    node = Node(); node.own = node
print(gc.isenabled(), gc.get_count()[0] < 10_000, callable(exit), "LD_BIND_NOW" in os.environ)
print([stream.seekable() for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin is sys.__stdin__)
print(sys.stdin.read(), sys.stdin.seek(0), sys.stdin.readline(), sys.stdin.encoding, sys.stdin.errors)
print(random.random())
"""
    found = [await run(sandbox, code, "a\nb") for _ in range(2)]
    expected = ["True True True False", "[True, False, False] True", "a", "b 0 a", " utf-8 surrogateescape"]
    assert [outcome.stdout.splitlines()[:5] for outcome in found] == [expected] * 2, found
    assert found[0].stdout != found[1].stdout


async def test_ending_is_that_of_the_interpreter(sandbox):
    code = """
import atexit, sys, threading
atexit.register(lambda: print("at exit"))
threading.Thread(target=lambda: print("thread")).start()
sys.exit("said why")
"""
    outcome = await run(sandbox, code)
    assert (outcome.exit_code, outcome.stdout, outcome.stderr) == (1, "thread\nat exit\n", "said why\n")
    failed = await run(sandbox, "def f():\n    return 1 / 0\nf()")
    assert failed.exit_code == 1
    assert failed.stderr.splitlines()[1].strip() == 'File "solution.py", line 3, in <module>'
