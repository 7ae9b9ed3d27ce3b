"""What every sandbox does: the embedded one, SandboxFusion and one of the user's own. A failing one is no reward."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from omegaconf import DictConfig, OmegaConf

from pipelinerl.actor.failures import classify
from pipelinerl.domains.coding import generate_rollout
from pipelinerl.domains.sandbox import Limits, Outcome, ProgramRunner, Sandbox, choice, remote, runner
from pipelinerl.domains.sandbox.choice import runner_of
from pipelinerl.errors import VerifierError
from pipelinerl.testing import run_rollout

KINDS = ("embedded", "fusion", "own")
REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -0.5, "unfinished": None}
PROBLEM = {"task": "Double.", "tests": {"inputs": ["2", "3"], "outputs": ["4", "6"]}}
PROGRAM = "```python\nprint(2 * int(input()))\n```"


class Own:
    """A sandbox of a user's: it is the embedded one, with another limit."""

    def __init__(self, wall_s: float):
        self._sandbox = Sandbox(limits=Limits(wall_s=wall_s))

    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        return await self._sandbox.run_python(code, stdins)


class Broken:
    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        raise VerifierError("the provider has no machine")


def own_sandbox(cfg: DictConfig, session: ClientSession) -> ProgramRunner:
    return Own(cfg.sandbox_timeout_s)


def broken_sandbox(cfg: DictConfig, session: ClientSession) -> ProgramRunner:
    return Broken()


async def run_code(request: web.Request) -> web.Response:
    """SandboxFusion's route, with the embedded sandbox behind it."""
    body = await request.json()
    sandbox = Sandbox(limits=Limits(wall_s=body["run_timeout"]))
    (outcome,) = await sandbox.run_python(body["code"], [body["stdin"]])
    sandbox.close()
    status = {"exited": "Finished", "time": "TimeLimitExceeded"}.get(outcome.ended, "Error")
    run = {"status": status, "return_code": outcome.exit_code, "stdout": outcome.stdout, "stderr": outcome.stderr}
    return web.json_response({"status": "Success", "run_result": run})


@asynccontextmanager
async def configured(kind: str, timeout_s: float = 60.0) -> AsyncIterator[dict[str, Any]]:
    """A configuration that chooses the sandbox."""
    app = web.Application()
    app.router.add_post("/run_code", run_code)
    async with TestServer(app) as server:
        chosen = {"fusion": {"sandbox_endpoint": str(server.make_url(""))}}
        chosen["own"] = {"sandbox": f"{__name__}.own_sandbox"}
        yield {"rewards": REWARDS, "sandbox_timeout_s": timeout_s, **chosen.get(kind, {})}
    if embedded := choice._sandboxes.pop(asyncio.get_running_loop(), None):
        embedded.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_sandbox_runs_each_input_alone(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    async with configured(kind) as cfg, ClientSession() as session:
        sandbox = runner_of(OmegaConf.create(cfg), session)
        outcomes = await sandbox.run_python("import sys\nx = int(input())\nprint(x)\nsys.exit(x)", ["0", "3", "0"])
        assert [(o.ended, o.exit_code, o.stdout.strip()) for o in outcomes] == [
            ("exited", 0, "0"), ("exited", 3, "3"), ("exited", 0, "0"),
        ]  # fmt: skip


@pytest.mark.parametrize("kind", ["fusion", "own"])  # the embedded one's limit is 15 s
async def test_program_without_end_is_stopped_and_the_last(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    async with configured(kind, timeout_s=1.0) as cfg, ClientSession() as session:
        outcomes = await runner_of(OmegaConf.create(cfg), session).run_python("while True: pass", ["", ""])
        assert [o.ended for o in outcomes] == ["time"]


@pytest.mark.parametrize("kind", KINDS)
async def test_program_in_any_sandbox_is_rewarded_alike(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    async with configured(kind) as cfg:
        for reply, reward in ((PROGRAM, 1.0), (PROGRAM.replace("2 *", "3 *"), 0.0), ("print(1)", -1.0)):
            assert (await run_rollout(generate_rollout, PROBLEM, [reply], cfg)).metrics.reward == reward


@pytest.mark.parametrize("how", ["jail", "down", "status", "silent", "own"])
async def test_sandbox_that_fails_is_no_reward(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
    monkeypatch.setattr("pipelinerl.domains.sandbox.fusion.FIRST_DELAY_S", 0.001)
    monkeypatch.setattr("pipelinerl.domains.sandbox.fusion.SPARE_S", 0.1)

    async def answer(request: web.Request) -> web.Response:
        if how == "silent":
            await asyncio.sleep(60)
        return web.Response(status=503)

    def no_jail(modes: Sequence[str]) -> None:
        raise VerifierError("programs cannot be isolated on this machine")

    app = web.Application()
    app.router.add_post("/run_code", answer)
    async with TestServer(app) as server:
        url = "http://127.0.0.1:9" if how == "down" else str(server.make_url(""))
        cfg: dict[str, Any] = {"rewards": REWARDS, "sandbox_endpoint": url, "sandbox_timeout_s": 0.05}
        if how == "jail":
            monkeypatch.setattr(runner, "start_jail", no_jail)
            cfg["sandbox_endpoint"] = None
        if how == "own":
            cfg["sandbox"] = f"{__name__}.broken_sandbox"
        with pytest.raises(VerifierError) as raised:
            await run_rollout(generate_rollout, PROBLEM, [PROGRAM], cfg)
    assert classify(raised.value) == "verifier"


FORGED = json.dumps({"ended": "exited", "exit_code": 0, "seconds": 0.0, "stdout": "42\n", "stderr": ""})
REMOTE_ATTACKS = {
    "pipe in the output's place": "for name in ('stdout.txt', 'stderr.txt'):\n    os.mkfifo(name)",
    "no folder": "import shutil; shutil.rmtree(os.getcwd(), ignore_errors=True)",
    "outcome through what runs it": f"""
try: open(f'/proc/{{os.getppid()}}/fd/1', 'w').write('\\n{FORGED}\\n')
except OSError: pass""",
    "memory of what runs it": "try: open(f'/proc/{os.getppid()}/mem', 'rb'); print('ESCAPED')\nexcept OSError: pass",
    "token": "print(*[open(name).read() for name in os.listdir() if 'token' in name])",
}


@pytest.fixture(params=["root", "user"])
def remote_machines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[remote.Machines]:
    """Processes of this machine in the place of a provider's, whose commands run as root or as a user."""
    if os.geteuid() != 0 and request.param == "root":
        pytest.skip("needs root")
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")  # which every user can read
    if python is None:
        pytest.skip("needs a python3 of the system")
    user = 12345 if os.geteuid() == 0 and request.param == "user" else None

    @asynccontextmanager
    async def machine(lifetime_s: int) -> AsyncIterator[remote.Execute]:
        async def execute(files: Mapping[str, bytes], command: Sequence[str], limit_s: int) -> str:
            for path, data in files.items():
                Path(path).write_bytes(data)
            if user is not None:
                for path in (remote.FOLDER, *files):
                    os.chown(path, user, user)
            process = await asyncio.create_subprocess_exec(python, *command[1:], stdout=subprocess.PIPE, user=user)
            return (await process.communicate())[0].decode()

        yield execute

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setattr(remote, "FOLDER", folder)
        yield machine


@pytest.mark.parametrize("attack", REMOTE_ATTACKS)
async def test_program_on_a_remote_machine_cannot_write_its_outcome(attack: str, remote_machines: remote.Machines):
    sandbox = remote.RemoteSandbox("Local", remote_machines, run_timeout_s=5.0)
    (outcome,) = await sandbox.run_python(f"import os\n{REMOTE_ATTACKS[attack]}\nprint(41)", [""])
    assert (outcome.ended, outcome.exit_code, outcome.stdout.strip()) == ("exited", 0, "41"), outcome
