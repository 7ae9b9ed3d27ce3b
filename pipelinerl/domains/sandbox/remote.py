"""Runs programs on machines of a provider, through its own client: ``sandbox=pipelinerl.domains.sandbox.remote.e2b``.

``daytona``, ``e2b`` and ``modal`` are functions for the key ``sandbox``. Their clients read keys and addresses from the
environment (`DAYTONA_API_KEY`, `E2B_API_KEY`, `MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET`). Every run has a machine of
its own without a network, because runs share nothing. A failure of the provider is a ``VerifierError``.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.domains.sandbox.fusion import RUN_TIMEOUT_S
from pipelinerl.domains.sandbox.inside import remote as inside
from pipelinerl.domains.sandbox.protocol import Outcome, run_in_turn
from pipelinerl.domains.sandbox.runner import KILLED, Limits, as_outcome
from pipelinerl.errors import VerifierError

AT_ONCE = 32
"""Concurrent machines of one rollout worker. Providers limit and bill them."""
START_S = 120
"""Seconds in which a machine must start and end, besides the program's time. A provider pulls images first."""
END_S = 60
"""Seconds for a machine to end. A provider ends one that takes longer at the end of its lifetime."""
FOLDER = "/tmp/program"
INSIDE = Path(inside.__file__).read_text(encoding="utf-8")
"""The script that runs a program there."""
OUTPUT_BYTES = Limits().output_kb * 1024
log = logging.getLogger(__name__)

Execute = Callable[[Mapping[str, bytes], Sequence[str], int], Awaitable[str]]
"""(path → content, command, limit in seconds) → the output: writes the files and runs the command."""


class Machines(Protocol):
    """Makes machines of a provider."""

    def __call__(
        self, lifetime_s: int, image: str | None = None, reaches: str | None = None
    ) -> AbstractAsyncContextManager[Execute]:
        """Makes a machine.

        Args:
            lifetime_s: seconds after which the provider ends it.
            image: an image, E2B's template. None: the provider's own, or Debian with Python.
            reaches: IPv4 address, the only one that it reaches. None: it has no network.
        """
        ...


_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


class RemoteSandbox:
    """A ``ProgramRunner`` on a provider's machines.

    Args:
        provider: name for messages.
        machines: makes the machines.
        run_timeout_s: longest time of one run, in seconds.
    """

    def __init__(self, provider: str, machines: Machines, run_timeout_s: float = RUN_TIMEOUT_S):
        self._provider, self._machines, self._run_timeout_s = provider, machines, run_timeout_s

    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        return await run_in_turn(partial(self._run, code), stdins)

    async def _run(self, code: str, stdin: str) -> Outcome:
        files = {
            "program.py": code.encode("utf-8", "surrogatepass"),
            "stdin.txt": stdin.encode("utf-8", "surrogatepass"),
        }
        lifetime_s = int(self._run_timeout_s) + START_S
        slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
        with provider_errors(self._provider):
            async with slots, asyncio.timeout(lifetime_s), self._machines(lifetime_s) as execute:
                report = await run_inside(self._provider, execute, files, self._run_timeout_s, OUTPUT_BYTES)
        return as_outcome(report) if report else KILLED


@contextmanager
def provider_errors(provider: str) -> Iterator[None]:
    """Raises every error as a ``VerifierError``: the clients raise errors of many kinds."""
    try:
        yield
    except VerifierError:
        raise
    except Exception as error:
        raise VerifierError(f"{provider} did not run the program: {type(error).__name__}: {error}") from error


async def run_inside(
    provider: str, execute: Execute, files: Mapping[str, bytes], limit_s: float, output_bytes: int
) -> dict[str, Any] | None:
    """Runs `inside.remote` with its files, and returns its report. None: it was killed during the run.

    Raises:
        VerifierError: the run did not begin.
    """
    token = secrets.token_hex()
    sent = {**files, "remote.py": INSIDE.encode(), "token": token.encode()}
    command = ["python3", f"{FOLDER}/remote.py", FOLDER, str(limit_s), str(output_bytes)]
    printed = await execute(
        {f"{FOLDER}/{name}": content for name, content in sent.items()}, command, int(limit_s) + START_S
    )
    head, *lines = printed.splitlines() or [""]
    if head != inside.BEGINS:
        raise VerifierError(f"{provider}'s machine does not run programs: {printed[-300:]!r}")
    written = [line.removeprefix(f"{token} ") for line in lines if line.startswith(f"{token} ")]
    return msgspec.json.decode(written[0]) if written else None


async def _end(provider: str, ending: Awaitable[object]) -> None:
    """Awaits the end of a machine. Its failure is a warning: it must not hide a report, or another error."""
    try:
        await asyncio.wait_for(ending, END_S)
    except Exception as error:  # noqa: BLE001 — as in ``provider_errors``
        log.warning("event=machine_kept provider=%s reason=%r: it ends after its lifetime", provider, error)


@asynccontextmanager
async def daytona_machine(
    lifetime_s: int, image: str | None = None, reaches: str | None = None
) -> AsyncIterator[Execute]:
    from daytona import AsyncDaytona, CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams

    how: dict[str, Any] = {"language": "python", "ephemeral": True, "ttl_minutes": -(-lifetime_s // 60)}
    if reaches is None:
        how["network_block_all"] = True
    else:
        how["network_allow_list"] = f"{reaches}/32"
    params = (
        CreateSandboxFromImageParams(image=image, os_user="root", **how)
        if image
        else CreateSandboxFromSnapshotParams(**how)
    )
    async with AsyncDaytona() as client:
        sandbox = await client.create(params, timeout=lifetime_s)

        async def execute(files: Mapping[str, bytes], command: Sequence[str], limit_s: int) -> str:
            for path, data in files.items():
                await sandbox.fs.upload_file(data, path)
            return (await sandbox.process.exec(" ".join(command), timeout=limit_s)).result

        try:
            yield execute
        finally:
            await _end("Daytona", client.delete(sandbox))


@asynccontextmanager
async def e2b_machine(lifetime_s: int, image: str | None = None, reaches: str | None = None) -> AsyncIterator[Execute]:
    from e2b import ALL_TRAFFIC, AsyncSandbox, CommandExitException

    how: dict[str, Any] = {"template": image} if image else {}
    how |= {"network": {"allow_out": [reaches], "deny_out": [ALL_TRAFFIC]}} if reaches else {}
    sandbox = await AsyncSandbox.create(timeout=lifetime_s, allow_internet_access=reaches is not None, **how)

    async def execute(files: Mapping[str, bytes], command: Sequence[str], limit_s: int) -> str:
        for path, data in files.items():
            await sandbox.files.write(path, data)
        try:
            return (await sandbox.commands.run(" ".join(command), user="root", timeout=limit_s)).stdout
        except CommandExitException as ended:  # with another exit code than 0, as when it was killed
            return ended.stdout or str(ended)

    try:
        yield execute
    finally:
        await _end("E2B", sandbox.kill())


@asynccontextmanager
async def modal_machine(
    lifetime_s: int, image: str | None = None, reaches: str | None = None
) -> AsyncIterator[Execute]:
    from modal import App, Image, Sandbox

    app = await App.lookup.aio("pipelinerl", create_if_missing=True)
    made = Image.from_registry(image) if image else Image.debian_slim()
    how: dict[str, Any] = {"outbound_cidr_allowlist": [f"{reaches}/32"]} if reaches else {"block_network": True}
    sandbox = await Sandbox.create.aio(app=app, image=made, timeout=lifetime_s, **how)

    async def execute(files: Mapping[str, bytes], command: Sequence[str], limit_s: int) -> str:
        for path, data in files.items():
            await sandbox.filesystem.write_bytes.aio(data, path)
        process = await sandbox.exec.aio(*command, timeout=limit_s)
        return await process.stdout.read.aio()

    try:
        yield execute
    finally:
        await _end("Modal", sandbox.terminate.aio())


def _make(provider: str, machines: Machines, cfg: DictConfig, session: aiohttp.ClientSession) -> RemoteSandbox:
    """Returns the sandbox of a run. ``session`` is not used, because the clients have their own."""
    return RemoteSandbox(provider, machines, cfg.get("sandbox_timeout_s") or RUN_TIMEOUT_S)


daytona = partial(_make, "Daytona", daytona_machine)
e2b = partial(_make, "E2B", e2b_machine)
modal = partial(_make, "Modal", modal_machine)
