"""Workspaces on machines of a provider, with clients that run their commands here instead. No provider is asked."""

# ruff: noqa: ASYNC109 — the clients have such parameters

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from pipelinerl.domains.sandbox import remote
from pipelinerl.domains.workspace import LIMITS, HostedWorkspace, NotCopied, hosted, pack_folder, run_agent_in_workspace
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.testing import FakeLLM
from pipelinerl.world.proxies import open_session
from tests.integration.test_workspace import ASK

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a provider's machine has root, who gives commands a user")
PYTHON = shutil.which("python3", path="/usr/local/bin:/usr/bin") or sys.executable
USER = 100_000 + os.getpid()
"""A user of this test alone: all of its processes are killed."""


class CommandExitException(Exception):
    """E2B's client raises it for every exit code but 0."""

    def __init__(self, stdout: str):
        self.stdout = stdout


class Provider:
    """What the clients are asked for. Each machine has a folder of its own in the place of ``/sandbox``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.monkeypatch = folder, monkeypatch
        self.started: list[dict] = []
        self.ended = 0
        self.user: int | None = None
        self.failure: Exception | None = None
        self.killed = False
        """Whether what runs a command is killed during the run."""
        self.does_not_end: Callable[[], Awaitable[None]] | None = None

    def start(self, **how) -> None:
        self.started.append(how)
        self.monkeypatch.setattr(hosted, "FOLDER", f"{self.folder}/sandbox{len(self.started)}")

    async def write(self, path: str, data: bytes) -> None:
        if self.failure:
            raise self.failure
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_bytes(data)

    async def run(self, command: str) -> tuple[str, int]:
        """Returns output and exit code."""
        if self.killed:
            return remote.inside.BEGINS, 137
        words = shlex.split(command)
        process = await asyncio.create_subprocess_exec(
            PYTHON, *words[1:], stdout=subprocess.PIPE, user=self.user, env={"PATH": "/usr/bin:/bin"}
        )
        return (await process.communicate())[0].decode(), await process.wait()

    async def end(self) -> None:
        self.ended += 1
        if self.does_not_end:
            await self.does_not_end()

    def clients(self) -> dict[str, ModuleType | SimpleNamespace]:
        """The modules of the three clients, with what is used of them."""

        def aio(function):
            return SimpleNamespace(aio=function)

        async def create_e2b(**how):
            self.start(**how)

            async def run(command, *, user, timeout):
                stdout, exit_code = await self.run(command)
                if exit_code:
                    raise CommandExitException(stdout)
                return SimpleNamespace(stdout=stdout)

            files = SimpleNamespace(write=self.write)
            return SimpleNamespace(files=files, commands=SimpleNamespace(run=run), kill=self.end)

        async def create_modal(app, **how):
            self.start(**how)

            async def write(data, path):
                await self.write(path, data)

            async def execute(*command, timeout):
                printed, _ = await self.run(shlex.join(command))

                async def read():
                    return printed

                return SimpleNamespace(stdout=SimpleNamespace(read=aio(read)))

            files = SimpleNamespace(write_bytes=aio(write))
            return SimpleNamespace(filesystem=files, exec=aio(execute), terminate=aio(self.end))

        async def lookup(name, create_if_missing):
            return name

        class AsyncDaytona:
            async def __aenter__(client):
                return client

            async def __aexit__(client, *_):
                pass

            async def create(client, params, timeout):
                self.start(**params)

                async def upload(data, path):
                    await self.write(path, data)

                async def execute(command, timeout):
                    return SimpleNamespace(result=(await self.run(command))[0])

                files, process = SimpleNamespace(upload_file=upload), SimpleNamespace(exec=execute)
                return SimpleNamespace(fs=files, process=process)

            async def delete(client, sandbox):
                await self.end()

        images = SimpleNamespace(from_registry=str, debian_slim=str)
        sandbox, app = SimpleNamespace(create=aio(create_modal)), SimpleNamespace(lookup=aio(lookup))
        e2b = {"ALL_TRAFFIC": "0.0.0.0/0", "CommandExitException": CommandExitException}
        return {
            "e2b": SimpleNamespace(**e2b, AsyncSandbox=SimpleNamespace(create=create_e2b)),
            "modal": SimpleNamespace(App=app, Image=images, Sandbox=sandbox),
            "daytona": SimpleNamespace(
                AsyncDaytona=AsyncDaytona, CreateSandboxFromImageParams=dict, CreateSandboxFromSnapshotParams=dict
            ),
        }


@pytest.fixture
def provider(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        provider = Provider(Path(folder), monkeypatch)
        monkeypatch.setattr(remote, "FOLDER", f"{folder}/program")
        monkeypatch.setattr(hosted, "UID", USER)
        os.mkdir(f"{folder}/sandbox1")  # of the first machine's image
        for name, module in provider.clients().items():
            monkeypatch.setitem(sys.modules, name, module)
        yield provider
        assert provider.ended == len(provider.started)
        left = [process.info for process in psutil.process_iter(["uids", "status"])]
        assert not [one for one in left if one["uids"].real == USER and one["status"] != psutil.STATUS_ZOMBIE]


@pytest.fixture
def template(tmp_path):
    (tmp_path / "one.txt").write_text("1\n")
    (tmp_path / "one.txt").chmod(0o755)
    return pack_folder(tmp_path)


OPEN: dict[str, dict[str, object]] = {
    "daytona": {"network_allow_list": "127.0.0.1/32", "os_user": "root", "image": "mine"},
    "e2b": {"network": {"allow_out": ["127.0.0.1"], "deny_out": ["0.0.0.0/0"]}, "template": "mine"},
    "modal": {"outbound_cidr_allowlist": ["127.0.0.1/32"], "image": "mine"},
}
CLOSED: dict[str, dict[str, object]] = {
    "daytona": {"network_block_all": True},
    "e2b": {"allow_internet_access": False},
    "modal": {"block_network": True},
}


@pytest.mark.parametrize("name", hosted.MACHINES)
async def test_agent_works_on_one_machine_and_a_copy_is_judged_on_another(provider, template, name):
    async def judge(copy):
        outcome = await copy.run(["sh", "-c", "cat; cat one.txt two.txt"], stdin="0\n")
        return float(outcome.stdout == "0\n1\nhello"), True

    make = partial(HostedWorkspace.make, provider=name, image="mine", endpoint_address="127.0.0.1")
    command = ["python3", "-c", f"{ASK}\nopen('two.txt', 'w').write(said)"]
    async with open_session() as session:
        result = await run_agent_in_workspace(FakeLLM.saying(["hello"]), session, command, template, judge, make=make)
    assert result.metrics.reward == 1.0
    agents, judges = provider.started
    assert OPEN[name].items() <= agents.items()
    assert CLOSED[name].items() <= judges.items()


@pytest.mark.parametrize(
    ("command", "ended", "exit_code"),
    [
        (["sh", "-c", "exit 3"], "exited", 3),
        (["sh", "-c", "kill -11 $$"], "signal", -11),
        (["sleep", "600"], "time", -9),
        (["python3", "-c", "while True: pass"], "time", -signal.SIGXCPU),
        (["head", "-c", "200000", "/dev/zero"], "output", 0),
        (["no-such-program"], "exited", 127),
        (["./one.txt"], "exited", 127),  # ENOEXEC: the kernel cannot run it
        (["true", "x" * (1 << 17)], "exited", 127),  # E2BIG: a question as an argument
        (["true", "a\0b"], "exited", 127),
        (["sh", "-c", "setsid sleep 600 & true"], "exited", 0),  # the fixture finds that it has ended
    ],
)
async def test_end_of_a_command_is_told(provider, template, command, ended, exit_code):
    async with await HostedWorkspace.make(template, provider="e2b") as workspace:
        limits = replace(LIMITS, cpu_s=1, wall_s=0.5 if command[0] == "sleep" else 60.0, output_kb=64)
        outcome, output = await workspace.execute(command, b"", {}, limits)
        assert (await workspace.run(["cat", "one.txt"])).stdout == "1\n"
    assert (outcome.ended, outcome.exit_code, len(output)) == (ended, exit_code, 65536 if ended == "output" else 0)


async def test_commands_of_one_workspace_take_turns(provider, template):
    async with await HostedWorkspace.make(template, provider="e2b") as workspace:
        outcomes = await asyncio.gather(*(workspace.run(["cat"], stdin=name) for name in "abc"))
    assert [outcome.stdout for outcome in outcomes] == ["a", "b", "c"]


async def test_command_reads_neither_the_token_nor_the_environment_of_root(provider, template):
    async with await HostedWorkspace.make(template, provider="e2b") as workspace:
        outcome = await workspace.run(["sh", "-c", f"id -u; cat {remote.FOLDER}/token; env"], env={"MINE": "1"})
    user, *variables = outcome.stdout.splitlines()
    assert user == str(USER)
    assert {line.partition("=")[0] for line in variables} - {"PWD", "SHLVL", "_"} == {"PATH", "HOME", "MINE"}
    assert "token" in outcome.stderr


async def test_what_a_command_leaves_in_the_home_does_not_run_before_the_next_one(provider, template):
    async with await HostedWorkspace.make(template, provider="e2b") as workspace:
        plant = "import os, site; path = site.getusersitepackages(); os.makedirs(path); os.chdir(path)\n"
        plant += "open('usercustomize.py', 'w').write('import os; os._exit(9)')"
        home = {"HOME": hosted.FOLDER}
        assert (await workspace.run(["python3", "-c", plant], env=home)).exit_code == 0
        assert (await workspace.run(["python3", "-c", ""], env=home)).exit_code == 9, "it is planted"
        assert (await workspace.run(["true"], env=home)).exit_code == 0


@pytest.mark.parametrize("name", hosted.MACHINES)
async def test_what_runs_a_command_is_killed_with_it(provider, template, name):
    async with await HostedWorkspace.make(template, provider=name) as workspace:
        provider.killed = True
        assert (await workspace.run(["true"])).ended == "signal"


async def fails() -> None:
    raise ConnectionError("not now")


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("end", [fails, hangs])
@pytest.mark.parametrize("name", hosted.MACHINES)
async def test_machine_that_its_provider_does_not_end_hides_no_error(
    provider, template, name, end, monkeypatch, caplog
):
    async with await HostedWorkspace.make(template, provider=name):
        provider.does_not_end = end
        monkeypatch.setattr(remote, "END_S", 0.01)
    with pytest.raises(NotCopied):
        await HostedWorkspace.make(b"no archive", provider=name)
    assert caplog.text.count("event=machine_kept") == 2


@pytest.mark.parametrize("address", [None, "my.host"])
async def test_agent_whose_endpoint_no_machine_reaches_is_refused(provider, template, address):
    make = partial(HostedWorkspace.make, provider="modal", endpoint_address=address)
    judges: deque = deque()
    async with open_session() as session:
        with pytest.raises(DomainError, match="set the IPv4 address by which"):
            await run_agent_in_workspace(FakeLLM.saying([]), session, ["true"], template, judges.append, make=make)
    assert provider.started == []


async def test_failure_of_a_provider_or_a_user_without_rights_is_no_reward(provider, template):
    provider.user = USER
    with pytest.raises(VerifierError, match="this machine's user must be root"):
        await HostedWorkspace.make(template, provider="daytona")
    provider.user, provider.failure = None, ConnectionError("no machines left")
    with pytest.raises(VerifierError, match="ConnectionError: no machines left"):
        await HostedWorkspace.make(template, provider="e2b")
    provider.failure = None
    with pytest.raises(NotCopied, match="raise disk_mb"):
        await HostedWorkspace.make(b"no archive", provider="e2b")
