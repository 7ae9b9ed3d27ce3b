"""The interface of a workspace: make it from a template, run commands in it, copy it, remove it.

Content is a tar archive. Only commands of the workspace pack and unpack it, with the agent's rights: this process never
reads what an agent wrote as anything but bytes.
"""

import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from pipelinerl.agents import RecordedAgent
from pipelinerl.domains.sandbox import Limits, Outcome
from pipelinerl.errors import DomainError, VerifierError

LIMITS = Limits(cpu_s=600, wall_s=600.0, memory_mb=2048, disk_mb=256, processes=64, limit_addresses=False)
"""Of an agent in its workspace. ``disk_mb`` is the size of the folder, and of /tmp."""
PACK = ("tar", "-cf", "-", ".")
UNPACK = ("sh", "-c", "chmod -R u+rwX . && find . -mindepth 1 -delete && exec tar -xof -")
COMPLAINT = 2
"""Tar's highest exit code for a file that it cannot read or write. A shell's codes for its own failures are higher."""

YEAR_2000 = 946_684_800
"""A template's times, in seconds. Zip archives know none before 1980."""


class NotCopied(DomainError):
    """The content does not fit into the limits, or tar cannot write it: of a template, or of what an agent left."""


class Workspace(ABC):
    """One folder. Leaving the block ``async with`` removes it, with every process that was started in it."""

    limits: Limits

    @abstractmethod
    async def execute(
        self, command: Sequence[str], stdin: bytes, env: Mapping[str, str], limits: Limits
    ) -> tuple[Outcome, bytes]:
        """Runs a command in the folder and ends all that it started. Returns its outcome, apart from it its output.

        Raises:
            VerifierError: the workspace failed or is gone. No behaviour of the command raises.
        """

    @abstractmethod
    async def remove(self) -> None:
        """Ends its processes and removes the folder."""

    async def run(self, command: Sequence[str], *, stdin: str = "", env: Mapping[str, str] | None = None) -> Outcome:
        """Runs a command like ``execute``, with the workspace's limits."""
        outcome, content = await self.execute(command, stdin.encode("utf-8", "surrogatepass"), env or {}, self.limits)
        return replace(outcome, stdout=content.decode(errors="replace"))

    async def snapshot(self) -> bytes:
        """Returns the content. What tar cannot read (a socket, a file without permission) is left out."""
        archive = replace(self.limits, output_kb=2048 * self.limits.disk_mb)  # headers may double small files
        outcome, content = await self.execute(PACK, b"", {}, archive)
        _check_copied(outcome, COMPLAINT)
        return content

    async def restore(self, content: bytes) -> None:
        """Replaces the content by a snapshot's or a template's."""
        outcome, _ = await self.execute(UNPACK, content, {}, self.limits)
        _check_copied(outcome, 0)

    async def begin(self, start: Awaitable[None], content: bytes) -> Self:
        """Awaits the start, and unpacks the content. If either fails, the workspace is removed."""
        try:
            await start
            await self.restore(content)
        except BaseException:
            await self.remove()
            raise
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.remove()


MakeWorkspace = Callable[[bytes, RecordedAgent | None], Awaitable[Workspace]]
"""(content, endpoint that its commands reach on loopback) → a workspace. Without an endpoint they reach nothing."""


def _check_copied(outcome: Outcome, highest: int) -> None:
    """Raises ``NotCopied`` where the content is the cause, ``VerifierError`` where it is not."""
    if outcome.ended == "signal" or outcome.exit_code > COMPLAINT:
        raise VerifierError(f"tar ended with {outcome.exit_code} in the workspace: {outcome.stderr[-300:]}")
    if outcome.ended != "exited" or outcome.exit_code > highest:
        raise NotCopied(
            f"the workspace's content cannot be copied within its limits ({outcome.ended}): raise disk_mb, or make it "
            f"smaller: {outcome.stderr[-300:]}"
        )


def pack_folder(folder: Path) -> bytes:
    """Returns the content of a trusted folder. The same files give the same bytes, whoever owns them."""

    def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.mtime = 0, 0, YEAR_2000
        member.uname = member.gname = ""
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, ".", filter=without_owner)  # in the order of the names
    return packed.getvalue()
