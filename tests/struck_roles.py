"""Processes that fork roles for a test to kill: each imports once what its role needs, so that a kill costs no imports.

    python -m tests.struck_roles actor RUN_DIR
    python -m tests.struck_roles server RUN_DIR PORT

A line on standard input starts the role. Its process ids come on standard output: of what stands for the launcher, of
the actor, or of the server alone. When it and all that it started have ended, another line does.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import benchmarks.struck_agent  # noqa: F401 — the domain of the run
import pipelinerl.actor.executor
import pipelinerl.actor.setup  # noqa: F401 — what a rollout worker needs
from pipelinerl.actor import worker_pool
from pipelinerl.actor.__main__ import main as actor_main
from pipelinerl.actor.worker import worker_main
from pipelinerl.llm import load_tokenizer
from pipelinerl.membership.role import run_role
from pipelinerl.testing import FakeServer, byte_tokenizer
from pipelinerl.world.process import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
TOKENIZER = byte_tokenizer()
VERSION, SAMPLED = "version", "sampled"
"""Files of a run folder: the weight version that its server samples from, and a byte for each of its completions."""


class Roles:
    """The process that forks a role, as a test sees it.

    Args:
        arguments: of this module.
    """

    def __init__(self, *arguments: str):
        self._arguments = arguments
        self._process: Process | None = None

    async def start(self) -> list[int]:
        """Starts the role and returns its process ids."""
        if self._process is None:
            command = [sys.executable, "-m", "tests.struck_roles", *self._arguments]
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        assert self._process.stdin
        self._process.stdin.write(b"start\n")
        return [int(pid) for pid in await self._told()]

    async def ended(self) -> list[int]:
        """Waits until no process of the role is left. Returns their exit statuses, of those that ended first first."""
        return [int(status) for status in await self._told()]

    async def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def _told(self) -> list[bytes]:
        assert self._process
        assert self._process.stdout
        return (await self._process.stdout.readline()).split()


class StruckServer:
    """A server of a run in a process of its own. It can be killed, and comes back on the same port."""

    def __init__(self, run_dir: Path, port: int):
        self._run_dir = run_dir
        self._roles = Roles("server", str(run_dir), str(port))
        self.url = f"http://127.0.0.1:{port}"
        self.version = 0

    @property
    def version(self) -> int:
        return int((self._run_dir / VERSION).read_text())

    @version.setter
    def version(self, version: int) -> None:
        (self._run_dir / f"{VERSION}.new").write_text(str(version))
        (self._run_dir / f"{VERSION}.new").rename(self._run_dir / VERSION)

    @property
    def num_sampled(self) -> int:
        """Completions that were sampled, whether or not the answer left the server."""
        path = self._run_dir / SAMPLED
        return path.stat().st_size if path.exists() else 0

    async def start(self) -> None:
        (self._pid,) = await self._roles.start()

    async def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        assert await self._roles.ended() == [signal.SIGKILL]

    async def stop(self) -> None:
        await self._roles.close()


class ForkedEarly:
    """Stands for ``multiprocessing`` in the actor: forks its one worker before the actor has threads.

    The worker waits for what it is started with. One that is spawned imports everything anew.
    """

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._heartbeat: Any = fork.RawValue("d", 0.0)
        self._ours, theirs = socket.socketpair()
        self._worker = fork.Process(target=self._work, args=(theirs,), daemon=True)
        self._worker.start()
        theirs.close()

    def _work(self, theirs: socket.socket) -> None:
        self._ours.close()
        started, files, _, _ = socket.recv_fds(theirs, 2**16, 1)
        if started:
            run_dir, job_name, index = json.loads(started)
            worker_main(run_dir, job_name, index, socket.socket(fileno=files[0]), self._heartbeat)

    def get_context(self, method: str) -> "ForkedEarly":
        return self

    def RawValue(self, code: str, value: float) -> Any:
        self._heartbeat.value = value
        return self._heartbeat

    def Process(self, *, args: tuple[Any, ...], **_: Any) -> "ForkedEarly":
        self._args = args
        return self

    def start(self) -> None:
        run_dir, job_name, index, sock, _ = self._args
        socket.send_fds(self._ours, [json.dumps([run_dir, job_name, index]).encode()], [sock.fileno()])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)


def be_launcher(run_dir: Path) -> None:
    """Starts the actor and prints both process ids. Ends with the actor, or with the process that forked it."""
    die_with_parent(signal.SIGKILL)
    actor = os.fork()
    if not actor:
        be_actor(run_dir)
    print(os.getpid(), actor, flush=True)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(actor, 0)[1]) & 0xFF)


def be_actor(run_dir: Path) -> None:
    log = os.open(run_dir / "actor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    worker_pool.multiprocessing = ForkedEarly()  # type: ignore[assignment]
    sys.argv = ["actor", "--run-dir", str(run_dir), "--job", "actor_0"]
    run_role(actor_main)


def be_server(run_dir: Path, port: int) -> None:
    die_with_parent(signal.SIGKILL)
    asyncio.run(serve(run_dir, port))


async def serve(run_dir: Path, port: int) -> None:
    rng = random.SystemRandom()
    sampled = os.open(run_dir / SAMPLED, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def answer(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
        os.write(sampled, b".")
        server.version = int((run_dir / VERSION).read_text())
        return [*TOKENIZER.encode("".join(rng.choices(ascii_lowercase, k=6))), TOKENIZER.eos_token_id]

    server = FakeServer(answer, delay_s=0.02)
    await server.start(port=port)
    print(os.getpid(), flush=True)
    await asyncio.Event().wait()


def fork_whenever_asked(role: Callable[[], None]) -> None:
    """Forks the role for each line on standard input, and reports when no process of it is left."""
    gc.freeze()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # workers outlive their parents for a moment
    while sys.stdin.readline():
        if not os.fork():
            role()
        statuses = []
        with contextlib.suppress(ChildProcessError):
            while True:
                statuses.append(os.waitpid(-1, 0)[1])
        print(*statuses, flush=True)


def main() -> None:
    kind, run_dir = sys.argv[1], Path(sys.argv[2])
    die_with_parent(signal.SIGKILL)
    if kind == "server":
        fork_whenever_asked(lambda: be_server(run_dir, int(sys.argv[3])))
    else:
        load_tokenizer(str(run_dir / "model"))
        fork_whenever_asked(lambda: be_launcher(run_dir))


if __name__ == "__main__":
    main()
