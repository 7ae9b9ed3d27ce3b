"""Programs on machines of Daytona, E2B and Modal, with their clients' own signatures, parameters and answers.

There is no account here: what a client would ask its provider for is done by a process of this machine.
"""

# ruff: noqa: ASYNC109 — the clients have such parameters

import asyncio
import inspect
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import daytona
import e2b
import modal
import pytest
from daytona._async.filesystem import AsyncFileSystem
from daytona._async.process import AsyncProcess
from e2b.sandbox_async.commands.command import Commands
from e2b.sandbox_async.filesystem.filesystem import Filesystem
from modal.sandbox._filesystem import _SandboxFilesystem
from omegaconf import OmegaConf

from pipelinerl.domains.sandbox import Outcome, remote
from pipelinerl.domains.sandbox.choice import runner_of
from pipelinerl.domains.workspace import hosted
from pipelinerl.errors import VerifierError

PROVIDERS = ("daytona", "e2b", "modal")
LIMIT_S = 20.0


class Provider:
    """What the machines of a test are asked for. ``python`` is what they have."""

    def __init__(self) -> None:
        self.started = self.ended = 0
        self.networks: list[bool] = []
        # Programs run as a user who may not read this environment.
        self.python = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
        self.failure: Exception | None = None

    def start(self, network: bool) -> None:
        if self.failure is not None:
            raise self.failure
        self.started += 1
        self.networks.append(network)

    async def write(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(data)

    async def run(self, *command: str) -> tuple[str, int]:
        """Returns output and exit code."""
        assert command[0] == "python3"
        shell = shlex.join([self.python, *command[1:]])
        process = await asyncio.create_subprocess_shell(shell, stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode(), await process.wait()

    async def end(self) -> None:
        self.ended += 1


def as_real(real: Callable[..., Any], fake: Callable[..., Any], *, method: bool = True) -> Callable[..., Any]:
    """``fake`` for calls that the client's own function takes."""
    signature = inspect.signature(real)

    async def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*([None] if method else []), *args, **kwargs)
        return await fake(*args, **kwargs)

    return call


def fake_daytona(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create(self: Any, params: daytona.CreateSandboxBaseParams, *, timeout: float) -> Any:
        provider.start(network=not params.network_block_all)
        return SimpleNamespace(
            fs=SimpleNamespace(upload_file=as_real(AsyncFileSystem.upload_file, upload)),
            process=SimpleNamespace(exec=as_real(AsyncProcess.exec, execute)),
        )

    async def upload(src: bytes, dst: str) -> None:
        await provider.write(dst, src)

    async def execute(command: str, *, timeout: int) -> daytona.ExecuteResponse:
        result, exit_code = await provider.run(*command.split())
        return daytona.ExecuteResponse(exit_code=exit_code, result=result)

    async def delete(self: Any, sandbox: Any) -> None:
        await provider.end()

    monkeypatch.setenv("DAYTONA_API_KEY", "none")
    monkeypatch.setattr(daytona.AsyncDaytona, "create", as_real(daytona.AsyncDaytona.create, create, method=False))
    monkeypatch.setattr(daytona.AsyncDaytona, "delete", as_real(daytona.AsyncDaytona.delete, delete, method=False))


def fake_e2b(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create(*, timeout: int, allow_internet_access: bool, **workspace: Any) -> Any:
        provider.start(network=allow_internet_access)
        return SimpleNamespace(
            files=SimpleNamespace(write=as_real(Filesystem.write, provider.write)),
            commands=SimpleNamespace(run=as_real(Commands.run, run)),
            kill=as_real(e2b.AsyncSandbox.kill, provider.end),
        )

    async def run(cmd: str, *, user: str, timeout: float) -> Any:
        assert user == "root"
        stdout, exit_code = await provider.run(*cmd.split())
        ended: dict[str, Any] = {"stdout": stdout, "stderr": "", "exit_code": exit_code, "error": None}
        if exit_code:
            raise e2b.CommandExitException(**ended)
        return SimpleNamespace(**ended)

    monkeypatch.setattr(e2b.AsyncSandbox, "create", as_real(e2b.AsyncSandbox.create, create, method=False))


def fake_modal(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lookup(name: str, *, create_if_missing: bool) -> modal.App:
        return modal.App(name)

    async def create(*, app: modal.App, image: modal.Image, timeout: int, block_network: bool = False, **_: Any) -> Any:
        provider.start(network=not block_network)
        return SimpleNamespace(
            filesystem=SimpleNamespace(write_bytes=aio(_SandboxFilesystem.write_bytes, write)),
            exec=aio(modal.Sandbox.exec, execute),
            terminate=aio(modal.Sandbox.terminate, provider.end),
        )

    async def write(data: bytes, remote_path: str) -> None:
        await provider.write(remote_path, data)

    async def execute(*command: str, timeout: int) -> Any:
        async def read() -> str:
            return (await provider.run(*command))[0]

        return SimpleNamespace(stdout=SimpleNamespace(read=SimpleNamespace(aio=read)))

    def aio(real: Callable[..., Any], fake: Callable[..., Any], *, method: bool = True) -> Any:
        return SimpleNamespace(aio=as_real(real, fake, method=method))

    monkeypatch.setattr(modal.App, "lookup", aio(modal.App.lookup, lookup, method=False))
    monkeypatch.setattr(modal.Sandbox, "create", aio(modal.Sandbox.create, create, method=False))


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Provider]]:
    provider = Provider()
    {"daytona": fake_daytona, "e2b": fake_e2b, "modal": fake_modal}[request.param](provider, monkeypatch)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(remote, "FOLDER", f"{folder}/program")
        yield request.param, provider


async def run(name: str, code: str, stdins: list[str], limit_s: float = LIMIT_S, **how: bool) -> list[Outcome]:
    cfg = OmegaConf.create({"sandbox": f"pipelinerl.domains.sandbox.remote.{name}", "sandbox_timeout_s": limit_s})
    return await runner_of(cfg, None).run_python(code, stdins, **how)  # type: ignore[arg-type]


async def test_each_input_has_a_machine_without_a_network_of_its_own(provider: tuple[str, Provider]):
    name, machines = provider
    code = "import sys\nx = int(input())\nprint(x)\nprint('é', file=sys.stderr)\nsys.exit(x)"
    outcomes = await run(name, code, ["0", "3", "0"])
    assert [(o.ended, o.exit_code, o.stdout, o.stderr) for o in outcomes] == [
        ("exited", 0, "0\n", "é\n"), ("exited", 3, "3\n", "é\n"), ("exited", 0, "0\n", "é\n"),
    ]  # fmt: skip
    assert (machines.started, machines.ended, machines.networks) == (3, 3, [False] * 3)


@pytest.mark.parametrize(
    ("code", "limit_s", "ended"),
    [
        ("while True: pass", 0.5, "time"),
        ("print('x' * 3_000_000)", LIMIT_S, "output"),
        ("import os; os.kill(os.getpid(), 11)", LIMIT_S, "signal"),
        # what runs it, if that is not root
        ("import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: os.kill(os.getpid(), 9)", LIMIT_S, "signal"),
    ],
)
async def test_programs_that_do_not_end_well_are_outcomes(
    code: str, limit_s: float, ended: str, provider: tuple[str, Provider]
):
    name, machines = provider
    assert [o.ended for o in await run(name, code, ["", ""], limit_s)] == [ended]
    assert (machines.started, machines.ended) == (1, 1)


async def test_provider_that_fails_is_no_outcome_and_its_machine_ends(provider: tuple[str, Provider]):
    name, machines = provider
    machines.python = "/bin/no-python"
    with pytest.raises(VerifierError, match="does not run programs"):
        await run(name, "print(1)", [""])
    assert (machines.started, machines.ended) == (1, 1)
    machines.failure = ConnectionError("no machines left")
    with pytest.raises(VerifierError, match="ConnectionError: no machines left"):
        await run(name, "print(1)", [""])


async def test_workspace_has_a_machine_of_its_image_that_reaches_the_endpoint(provider: tuple[str, Provider]):
    name, machines = provider
    async with hosted.MACHINES[name](60, "mine", "192.0.2.1"):
        assert (machines.started, machines.networks) == (1, [True])
    assert machines.ended == 1
