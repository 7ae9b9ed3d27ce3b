"""Workspaces on machines of E2B, Daytona or Modal, through the clients of ``domains.sandbox.remote``.

A machine reaches no loopback of this one. So the rollout's endpoint also answers on a port of all addresses, to who
knows the rollout's key, and ``endpoint_address`` is all that the machine reaches. Without an agent it has no network.
"""

import asyncio
import base64
import ipaddress
import json
import resource
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Literal, Self

from pipelinerl.agents import RecordedAgent
from pipelinerl.domains.sandbox import Limits, Outcome
from pipelinerl.domains.sandbox.remote import (
    START_S,
    Execute,
    daytona_machine,
    e2b_machine,
    modal_machine,
    provider_errors,
    run_inside,
)
from pipelinerl.domains.sandbox.runner import KILLED, as_outcome
from pipelinerl.domains.workspace.base import LIMITS, Workspace
from pipelinerl.errors import DomainError

MACHINES = {"daytona": daytona_machine, "e2b": e2b_machine, "modal": modal_machine}
FOLDER = "/sandbox"
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}
UID = 61_000
"""The user of the commands. Nobody else's processes may have it: those that a command leaves are killed by it."""


class HostedWorkspace(Workspace):
    """A folder of a provider's machine."""

    def __init__(self, provider: str, limits: Limits):
        self.limits = limits
        self._provider, self._machine = provider, AsyncExitStack()
        self._execute: Execute | None = None
        self._turn = asyncio.Lock()
        """Held by a run: all of them have the same files of ``inside.remote``, and the same user."""
        self._urls = ("", "")
        """The endpoint's address on this machine, and the one in its place there. Empty: there is none."""

    @classmethod
    async def make(
        cls,
        content: bytes,
        agent: RecordedAgent | None = None,
        *,
        provider: Literal["daytona", "e2b", "modal"],
        image: str | None = None,
        endpoint_address: str | None = None,
        lifetime_s: int = 3600,
        limits: Limits = LIMITS,
    ) -> Self:
        """Starts a machine and unpacks the content in it.

        Args:
            content: a template or a snapshot.
            agent: commands find its endpoint in their environment. None: there is no network.
            provider: whose machine.
            image: has the agent, `sh`, `tar`, `find` and `python3`, and root is its user. E2B: a template.
            endpoint_address: IPv4 address by which the provider's machines reach all ports of this one.
            lifetime_s: seconds after which the provider ends the machine, also if this process was killed.
            limits: of each run, but for ``memory_mb``: the machine's memory is the provider's.

        Raises:
            DomainError: ``endpoint_address`` is missing or no IPv4 address.
            VerifierError: the machine did not start, or has another user than root.
            NotCopied: the content is larger than ``disk_mb``.
        """
        workspace = cls(provider, limits)
        reaches = None if agent is None else _checked(provider, endpoint_address)
        return await workspace.begin(workspace._start(agent, image, reaches, lifetime_s), content)

    async def _start(
        self, agent: RecordedAgent | None, image: str | None, reaches: str | None, lifetime_s: int
    ) -> None:
        with provider_errors(self._provider):
            async with asyncio.timeout(START_S):
                self._execute = await self._machine.enter_async_context(
                    MACHINES[self._provider](lifetime_s, image, reaches)
                )
        if agent is not None:
            listening = socket.create_server(("", 0))
            there = f"http://{reaches}:{listening.getsockname()[1]}"
            self._urls = (agent.anthropic_base_url, there)
            await agent.answer_on(listening)

    async def execute(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> tuple[Outcome, bytes]:
        assert self._execute
        output_bytes = limits.output_kb << 10
        task = {
            "command": list(command),
            "folder": FOLDER,
            "uid": UID,
            "environment": VARIABLES | {name: value.replace(*self._urls) for name, value in env.items()},
            "limits": {
                resource.RLIMIT_CPU: limits.cpu_s,
                resource.RLIMIT_NPROC: limits.processes,
                resource.RLIMIT_FSIZE: max(limits.disk_mb << 20, output_bytes + 1),
            },
        }
        files = {"task.json": json.dumps(task).encode(), "stdin.txt": stdin}
        with provider_errors(self._provider):
            async with self._turn, asyncio.timeout(limits.wall_s + START_S):
                report = await run_inside(self._provider, self._execute, files, limits.wall_s, output_bytes)
        if report is None:
            return KILLED, b""
        return replace(as_outcome(report), stdout=""), base64.b64decode(report["stdout"])

    async def remove(self) -> None:
        await self._machine.aclose()


def _checked(provider: str, address: str | None) -> str:
    try:
        return str(ipaddress.IPv4Address(address or ""))
    except ValueError as error:
        raise DomainError(
            f"a machine of {provider} reaches the rollout's endpoint by its address alone, but endpoint_address is "
            f"{address!r}: set the IPv4 address by which the internet reaches all ports of this machine"
        ) from error
