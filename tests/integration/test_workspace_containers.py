"""Workspaces in containers, with a client that makes folders of this machine instead. No container is started here."""

import asyncio
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial

import pytest

from pipelinerl.domains.sandbox.inside import forward
from pipelinerl.domains.workspace import LIMITS, ContainerWorkspace, pack_folder, run_agent_in_workspace
from pipelinerl.errors import VerifierError
from pipelinerl.testing import FakeLLM
from pipelinerl.world.proxies import open_session
from tests.integration.test_workspace import ASK

CLIENT = f"""#!{sys.executable}
import os, shutil, sys
state, (verb, *rest) = os.path.dirname(__file__), sys.argv[1:]
options = dict(word[2:].partition("=")[::2] for word in rest if word.startswith("--"))
with open(state + "/calls", "a") as calls:
    calls.write(" ".join(word for word in sys.argv[1:] if len(word) < 200) + "\\n")
if verb == "run":
    os.mkdir(f"{{state}}/{{options['name']}}")
    os.execv(sys.executable, [sys.executable, "-c", rest[-2], "0"])  # the port is the endpoint's own here
words = [word for word in rest if not word.startswith("--")]
folder = f"{{state}}/{{words[0]}}"
if verb == "rm":
    shutil.rmtree(folder)
elif os.path.isdir(folder):
    os.chdir(folder)
    try:
        os.execvp(words[1], rest[rest.index(words[0]) + 1 :])
    except OSError:
        sys.exit(127)
sys.exit(125 if verb == "exec" else 0)
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text(CLIENT)
    (tmp_path / "docker").chmod(0o755)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # the name of a socket has 107 bytes at most
        monkeypatch.setattr("tempfile.tempdir", temporary)
        yield partial(ContainerWorkspace.make, image="python:3.11", client=str(tmp_path / "docker"))
        assert os.listdir(temporary) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calls", "docker", "template"]


@pytest.fixture
def template(tmp_path):
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "one.txt").write_text("1\n")
    return pack_folder(tmp_path / "template")


async def test_agent_works_in_one_container_and_a_copy_is_judged_in_another(make, template, tmp_path):
    async def judge(copy):
        outcome = await copy.run(["sh", "-c", "cat; cat one.txt two.txt"], stdin="0\n")
        return float(outcome.stdout == "0\n1\nhello"), True

    command = ["python3", "-c", f"{ASK}\nopen('two.txt', 'w').write(said)"]
    async with open_session() as session:
        result = await run_agent_in_workspace(FakeLLM.saying(["hello"]), session, command, template, judge, make=make)
    assert result.metrics.reward == 1.0
    calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines() if line.startswith(("run", "rm"))]
    assert [call[0] for call in calls] == ["run", "rm", "run", "rm"]
    assert {"--rm", "--network=none", "--read-only", "--cap-drop=ALL"} < set(calls[0])
    assert (int(calls[0][-1]) > 1024, calls[2][-1]) == (True, "0")  # only the agent's has an endpoint
    assert "OPENAI_API_KEY=" not in (tmp_path / "calls").read_text()


@pytest.mark.parametrize(
    ("command", "ended", "exit_code"),
    [
        (["sh", "-c", "exit 3"], "exited", 3),
        (["sh", "-c", "exit 137"], "signal", -9),
        (["sleep", "600"], "time", -9),
        (["yes"], "output", -9),
        (["no-such-program"], "exited", 127),
    ],
)
async def test_end_of_a_command_is_told(make, template, command, ended, exit_code):
    async with await make(template) as workspace:
        limits = replace(LIMITS, wall_s=1.0 if ended == "time" else 60.0, output_kb=64)
        outcome, output = await workspace.execute(command, b"", {}, limits)
    assert (outcome.ended, outcome.exit_code, len(output)) == (ended, exit_code, 65536 if ended == "output" else 0)


async def test_commands_of_one_workspace_take_turns(make, template):
    async with await make(template) as workspace:
        outcomes = await asyncio.gather(*(workspace.run(["cat"], stdin=name) for name in "abc"))
    assert [outcome.stdout for outcome in outcomes] == ["a", "b", "c"]


async def test_failure_of_the_client_is_a_failure(make, template):
    async with await make(template) as workspace:
        with pytest.raises(VerifierError, match="did not run sh"):
            await workspace.run(["sh", "-c", "exit 125"])
        workspace._process.kill()
        with pytest.raises(VerifierError, match="is gone"):
            await workspace.run(["true"])
    with pytest.raises(VerifierError, match="started no container of python"):
        await make(template, client="false")


async def test_forwarder_passes_both_directions(tmp_path, monkeypatch):
    async def echo(reader, writer):
        writer.write((await reader.read()).upper())
        writer.close()

    monkeypatch.setattr(forward, "ENDPOINT", str(tmp_path / "socket"))
    async with (
        await asyncio.start_unix_server(echo, forward.ENDPOINT),
        await asyncio.start_server(forward.connect, "127.0.0.1", 0) as server,
    ):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"x" * 200_000)
        writer.write_eof()
        assert await reader.read() == b"X" * 200_000
        writer.close()
