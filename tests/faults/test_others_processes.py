"""What programs and tool servers start ends with them, with their rollout and with their worker, wherever it hides."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.agents import run
from pipelinerl.agents.run import run_program
from pipelinerl.domains.libraries.mcp import open_tools
from pipelinerl.world.process import kept
from tests.escapes import ESCAPES, escape, is_alive
from tests.waiting import wait_until

CHECKOUT = str(Path(__file__).parents[2])
SHELL_ENV = {"PATH": os.environ["PATH"]}
STUBBORN_SERVER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.run(["sh", "-c", sys.argv[1]])
from tests.mcp_sums import server
server.run()
time.sleep(600)
"""
WORKER = """
import asyncio, sys
from omegaconf import OmegaConf
from pipelinerl.agents.run import run_program
from pipelinerl.domains.libraries.mcp import open_tools
from tests.faults.test_others_processes import stubborn_server

async def use_server(line):
    async with open_tools(OmegaConf.create({}), {"sums": stubborn_server(line)}):
        await asyncio.Event().wait()

async def run(line):
    await run_program(["sh", "-c", line + "; sleep 600"], "", {"PATH": sys.argv[3]})

asyncio.run({"program": run, "server": use_server}[sys.argv[1]](sys.argv[2]))
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """The file to which the daemon of a test writes its process id."""
    file = tmp_path / "pid"
    yield file
    if file.exists() and is_alive(file):
        os.kill(int(file.read_text()), signal.SIGKILL)


def stubborn_server(line: str) -> dict[str, Any]:
    """A server over standard input that goes on at its end, and after SIGTERM."""
    return {"command": sys.executable, "args": ["-c", STUBBORN_SERVER, line], "env": {"PYTHONPATH": CHECKOUT}}


@pytest.mark.parametrize("how", ESCAPES)
async def test_program_that_ended_has_left_nothing(how: str, daemon: Path) -> None:
    status, out, err = await run_program(["sh", "-c", f"{escape(how, daemon)}; echo 42"], "", SHELL_ENV)
    assert (status, out, err) == (0, b"42\n", b"")
    assert not is_alive(daemon)


@pytest.mark.parametrize("how", ESCAPES)
async def test_cancelled_rollout_has_left_nothing(how: str, daemon: Path) -> None:
    running = asyncio.create_task(run_program(["sh", "-c", f"{escape(how, daemon)}; sleep 600"], "", SHELL_ENV))
    await asyncio.to_thread(wait_until, daemon.exists)
    assert is_alive(daemon)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_alive(daemon)


async def test_program_that_has_stopped_its_keeper_ends_with_its_rollout(daemon: Path) -> None:
    line = f"kill -STOP $PPID\n{escape('double fork', daemon)}\nsleep 600"
    running = asyncio.create_task(run_program(["sh", "-c", line], "", SHELL_ENV))
    await asyncio.to_thread(wait_until, daemon.exists)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not is_alive(daemon)


async def test_end_of_a_rollout_leaves_the_daemon_of_its_neighbour(daemon: Path) -> None:
    neighbour = asyncio.create_task(
        run_program(["sh", "-c", f"{escape('double fork', daemon)}; sleep 600"], "", SHELL_ENV)
    )
    await asyncio.to_thread(wait_until, daemon.exists)
    ours = daemon.with_name("ours")
    await run_program(["sh", "-c", escape("double fork", ours)], "", SHELL_ENV)
    assert (is_alive(ours), is_alive(daemon)) == (False, True)
    neighbour.cancel()
    await asyncio.gather(neighbour, return_exceptions=True)
    assert not is_alive(daemon)


@pytest.mark.parametrize("end", ["in order", "cancelled"])
async def test_server_that_ignores_its_end_is_gone_with_its_daemon(end: str, daemon: Path) -> None:
    used = asyncio.Event()

    async def use() -> None:
        servers = {"sums": stubborn_server(escape("empty environment", daemon))}
        async with open_tools(OmegaConf.create({}), servers) as tools:
            assert "add" in [tool["function"]["name"] for tool in tools.descriptions]
            used.set()
            await asyncio.sleep(0 if end == "in order" else 600)

    using = asyncio.create_task(use())
    is_used = asyncio.create_task(used.wait())
    await asyncio.wait({using, is_used}, return_when=asyncio.FIRST_COMPLETED)
    assert used.is_set(), using.exception()
    assert is_alive(daemon)
    if end == "cancelled":
        using.cancel()
    await asyncio.gather(using, return_exceptions=True)
    assert not is_alive(daemon)


@pytest.mark.parametrize("what", ["program", "server"])
def test_killed_worker_leaves_nothing_of_its_rollouts(what: str, daemon: Path) -> None:
    line = escape("empty environment", daemon)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, what, line, os.environ["PATH"]], cwd=CHECKOUT)
    wait_until(daemon.exists)
    worker.kill()
    worker.wait()
    wait_until(lambda: not is_alive(daemon))


async def test_output_beyond_the_limit_keeps_its_end_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "MAX_OUTPUT_BYTES", 1000)
    code = "import sys; sys.stderr.write('e' * 300_000); print('x' * 300_000 + '42')"
    run.warn_cut.cache_clear()
    for _ in range(2):
        status, out, err = await run_program([sys.executable, "-c", code], "", SHELL_ENV)
        assert (status, out, err) == (0, b"x" * 997 + b"42\n", b"e" * 1000)
    assert [record.message for record in caplog.records] == [
        f"event=output_cut program={sys.executable} limit_bytes=1000: only the end of it is read"
    ]


@pytest.mark.parametrize(
    ("line", "code"),
    [("exit 7", 7), ("kill -KILL $$", -9), ("kill -TERM $$", -15), ("kill -SEGV $$", -11), ("no-such-program", 127)],
)
def test_kept_command_ends_as_it_would_alone(line: str, code: int) -> None:
    assert subprocess.run(kept(["sh", "-c", line], 0), stderr=subprocess.DEVNULL, check=False).returncode == code


async def test_program_that_signals_its_own_group_ends_by_itself() -> None:
    program = "import os, signal; signal.signal(15, signal.SIG_IGN); os.killpg(os.getpid(), 15); os.kill(0, 15)"
    assert await run_program([sys.executable, "-c", program], "", SHELL_ENV) == (0, b"", b"")


async def test_half_characters_of_a_task_do_not_stop_its_program() -> None:
    assert await run_program(["cat"], "a\ud800b", SHELL_ENV) == (0, b"a?b", b"")


def test_missing_program_is_named() -> None:
    done = subprocess.run(kept(["no-such-program"], 0), stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (127, "no-such-program: No such file or directory\n")


def test_command_that_closes_its_output_is_seen_by_its_reader() -> None:
    process = subprocess.Popen(
        kept(["sh", "-c", "exec >&-; read _; exit 4"], 0), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin
    assert process.stdout
    assert process.stdout.read() == b""
    assert process.poll() is None
    process.stdin.close()
    assert process.wait(60) == 4
    process.stdout.close()


def test_request_to_end_is_passed_on_and_waited_for() -> None:
    line = "trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.01; done"
    process = subprocess.Popen(kept(["sh", "-c", line], 600), stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    process.terminate()
    assert process.stdout.read() == b"saved\n"
    assert process.wait(60) == 3
    process.stdout.close()


@pytest.mark.parametrize("victim", ["keeper", "command"])
def test_killed_keeper_or_command_takes_the_other_along(victim: str, tmp_path: Path) -> None:
    process = subprocess.Popen(kept(["sh", "-c", "echo $$; exec sleep 600"], 0), stdout=subprocess.PIPE)
    assert process.stdout
    command = os.pidfd_open(pid := int(process.stdout.readline()))
    try:
        os.kill(process.pid if victim == "keeper" else pid, signal.SIGKILL)
        assert process.wait(60) == -9
        wait_until(lambda: has_ended(command))
    finally:
        os.close(command)
        process.stdout.close()


def test_keeper_whose_starter_has_ended_starts_nothing(tmp_path: Path) -> None:
    *keeper, parent, _ = kept(["touch"], 0)
    command = [*keeper, str(int(parent) + 1), "touch", str(tmp_path / "started")]
    assert subprocess.run(command, check=False).returncode == 127
    assert not (tmp_path / "started").exists()


def has_ended(pidfd: int) -> bool:
    with open(f"/proc/self/fdinfo/{pidfd}") as stream:
        return "Pid:\t-1" in stream.read()
