"""Workspaces in containers, through the client of Docker or Podman. The image needs `sh`, `tar`, `find` and `python3`.

A container has no network. Its process 1 (``inside.forward``) passes connections on to the rollout's endpoint, over a
Unix socket in a folder that is bound in. It ends with its client's standard input, so the container ends when this
process does, and the client's `--rm` removes it.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pipelinerl.agents import RecordedAgent
from pipelinerl.agents.run import READ_BYTES, read_end, write_all
from pipelinerl.domains.sandbox import Limits, Outcome
from pipelinerl.domains.sandbox.inside import forward
from pipelinerl.domains.sandbox.protocol import Ended
from pipelinerl.domains.workspace.base import LIMITS, Workspace
from pipelinerl.errors import VerifierError

FORWARD = Path(forward.__file__).read_text(encoding="utf-8")
FOLDER = "/sandbox"
START_S = 300.0
"""Seconds for a container to start, with its image on this machine: pull it before the run."""
END_S = 60.0
"""Seconds in which the client must end processes and remove the container."""
STDERR_BYTES = 8192
CLIENT_FAILED, SIGNALLED = 125, 128
"""The clients' exit code where they failed, and the one to which they add the signal that ended a command."""
log = logging.getLogger(__name__)


class ContainerWorkspace(Workspace):
    """A folder in the memory of a container."""

    def __init__(self, client: str, limits: Limits):
        self.limits = limits
        self._client, self._name = client, f"pipelinerl-{secrets.token_hex(8)}"
        self._bound = tempfile.mkdtemp(prefix="workspace-")
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        """Held by a run: its end is that of all processes of the container."""

    @classmethod
    async def make(
        cls,
        content: bytes,
        agent: RecordedAgent | None = None,
        *,
        image: str,
        client: str = "docker",
        limits: Limits = LIMITS,
        options: Sequence[str] = (),
    ) -> Self:
        """Starts a container and unpacks the content in it.

        Args:
            content: a template or a snapshot.
            agent: its ``base_url`` is answered inside. None: nothing is.
            image: the image. Its own command is not run.
            client: `docker` or `podman`.
            limits: memory, files and processes of the container; time and output of each run.
            options: further options of the client's `run`, as `--volume=/opt/agent:/opt/agent:ro`.

        Raises:
            VerifierError: the container did not start.
            NotCopied: the content is larger than ``disk_mb``.
        """
        workspace = cls(client, limits)
        return await workspace.begin(workspace._start(agent, image, options), content)

    async def _start(self, agent: RecordedAgent | None, image: str, options: Sequence[str]) -> None:
        port = 0
        if agent is not None:
            port = urlsplit(agent.base_url).port or 0
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(f"{self._bound}/{os.path.basename(forward.ENDPOINT)}")
            os.chmod(listening.getsockname(), 0o666)
            os.chmod(self._bound, 0o755)  # the container's user may be another
            await agent.answer_on(listening)
        memory, disk = f"{self.limits.memory_mb}m", f"exec,mode=1777,size={self.limits.disk_mb}m"
        self._process = await asyncio.create_subprocess_exec(
            *(self._client, "run", "--rm", "--interactive", f"--name={self._name}", "--network=none", "--read-only"),
            *("--cap-drop=ALL", "--security-opt=no-new-privileges", f"--memory={memory}", f"--memory-swap={memory}"),
            *(f"--pids-limit={self.limits.processes + 2}", f"--tmpfs={FOLDER}:{disk}", f"--tmpfs=/tmp:{disk}"),
            *(f"--volume={self._bound}:{os.path.dirname(forward.ENDPOINT)}:ro", "--user=1000:1000", "--env=HOME=/tmp"),
            *(*options, "--entrypoint=python3", image, "-c", FORWARD, str(port)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            await self._confirm(START_S)
        except VerifierError as failure:
            raise VerifierError(f"{self._client} started no container of {image}: see its error output") from failure

    async def execute(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> tuple[Outcome, bytes]:
        async with self._turn:
            return await self._execute(command, stdin, env, limits)

    async def _execute(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> tuple[Outcome, bytes]:
        names = [f"--env={name}" for name in env]  # the client finds their values in its own environment
        started, output = time.monotonic(), bytearray()
        ended: Ended = "exited"
        process = await asyncio.create_subprocess_exec(
            *(self._client, "exec", "--interactive", f"--workdir={FOLDER}", *names, self._name, *command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **env},
            start_new_session=True,
        )
        assert process.stdin
        assert process.stdout
        assert process.stderr
        others = asyncio.gather(write_all(process.stdin, stdin), read_end(process.stderr, command[0]))
        try:
            async with asyncio.timeout(limits.wall_s):
                while ended == "exited" and (chunk := await process.stdout.read(READ_BYTES)):
                    output += chunk
                    ended = "output" if len(output) > limits.output_kb << 10 else "exited"
                if ended == "exited":
                    await process.wait()
        except TimeoutError:
            ended = "time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            code = await process.wait()
            _, errors = await others
        await self._end_processes()
        if code == CLIENT_FAILED:
            raise VerifierError(f"{self._client} did not run {command[0]}: {errors[-300:].decode(errors='replace')}")
        if ended == "exited" and code > SIGNALLED:
            ended, code = "signal", SIGNALLED - code
        stderr = errors[-STDERR_BYTES:].decode(errors="replace")
        outcome = Outcome(ended=ended, exit_code=code, seconds=time.monotonic() - started, stdout="", stderr=stderr)
        return outcome, bytes(output[: limits.output_kb << 10])

    async def _end_processes(self) -> None:
        assert self._process
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        await self._confirm(END_S)

    async def _confirm(self, limit_s: float) -> None:
        """Waits for a line of process 1. Raises ``VerifierError`` if there is none."""
        assert self._process
        assert self._process.stdout
        line = b""
        with contextlib.suppress(TimeoutError):
            line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        if line.strip() != forward.READY.encode():
            raise VerifierError(f"the workspace's container {self._name} is gone, or silent for {limit_s:g} s")

    async def remove(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            removal = await asyncio.create_subprocess_exec(
                *(self._client, "rm", "--force", self._name), stdout=asyncio.subprocess.DEVNULL
            )
            for process in (removal, self._process):
                try:
                    await asyncio.wait_for(process.wait(), END_S)
                except TimeoutError:
                    log.warning("event=container_kept name=%s: %s does not end it", self._name, self._client)
                    process.kill()
        shutil.rmtree(self._bound, ignore_errors=True)
