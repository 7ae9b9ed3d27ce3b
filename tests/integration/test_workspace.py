"""Workspaces in the embedded jail: what a command reaches, what is copied, what ends it, and what is left of it."""

import asyncio
import io
import os
import socket
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from pipelinerl.agents import record_agent
from pipelinerl.domains.sandbox import runner
from pipelinerl.domains.workspace import LIMITS, HiddenTest, JailWorkspace, NotCopied, count_passed, jailed, pack_folder
from pipelinerl.domains.workspace.rollout import run_agent_in_workspace
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.testing import FakeLLM
from pipelinerl.world.proxies import open_session
from tests.integration.test_sandbox import usable_modes
from tests.unit.actor.test_answer_journal import HoldingServer, Life, chat

SMALL = replace(LIMITS, cpu_s=20, wall_s=60.0, memory_mb=256, disk_mb=8, processes=16, output_kb=64)
ASK = """
import json, os, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "say"}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
request = urllib.request.Request(address, json.dumps(body).encode(), headers)
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


@pytest.fixture
def template(tmp_path: Path) -> bytes:
    (tmp_path / "one.txt").write_text("1\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to("../one.txt")
    return pack_folder(tmp_path)


@pytest.fixture(params=usable_modes())
async def workspace(request, template):
    async with await JailWorkspace.make(template, mode=request.param, limits=SMALL) as workspace:
        yield workspace


async def output(workspace: JailWorkspace, command: str) -> str:
    return (await workspace.run(["sh", "-c", command])).stdout


async def test_commands_share_the_folder_and_nothing_else(workspace):
    await workspace.run(["sh", "-c", "echo new >two.txt; touch /tmp/mark; (sleep 600 &) ; sleep 600 & "])
    assert (
        await output(workspace, "cat folder/link two.txt; ls /tmp; id -u")
        == f"1\nnew\n{await output(workspace, 'id -u')}"
    )
    assert (await workspace.run(["python3", "-"], stdin="print(input)")).exit_code == 0
    missing = await workspace.run(["no-such-program"])
    assert (missing.exit_code, missing.stderr) == (127, "no-such-program: No such file or directory\n")
    refused = await workspace.run(["echo", "a\0b"])
    assert (refused.exit_code, refused.stderr) == (127, "echo: embedded null byte\n")


async def test_one_workspace_finds_nothing_of_another(workspace, template):
    hold = """
import socket, time
named = socket.socket(socket.AF_UNIX); named.bind("\\0mark"); named.listen()
server = socket.socket(); server.bind(("127.0.0.1", 4321)); server.listen()
open("/tmp/mark", "w"); open("mark", "w"); time.sleep(600)
"""
    look = """
import os, socket
for family, address in ((socket.AF_UNIX, "\\0mark"), (socket.AF_INET, ("127.0.0.1", 4321))):
    try: socket.socket(family).connect(address); print("found", address)
    except OSError: pass
print([path for path in ("mark", "/tmp/mark") if os.path.exists(path)], os.getpid() < 9)
"""
    held = asyncio.create_task(workspace.run(["python3", "-c", hold]))
    while "mark" not in await output(workspace, "ls"):  # ends: the other command writes it
        pass
    async with await JailWorkspace.make(template, mode=workspace._mode, limits=SMALL) as other:
        assert (await other.run(["python3", "-c", look])).stdout == "[] True\n"
    held.cancel()


async def test_only_the_endpoint_of_its_rollout_is_reached(template):
    """A server of this machine on loopback, one in the abstract names, and the world are not."""
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as named:
        server.bind(("127.0.0.1", 0))
        named.bind(f"\0pipelinerl-{os.getpid()}")
        server.listen()
        named.listen()
        code = f"""
import socket
for family in (socket.AF_INET6, socket.AF_VSOCK, socket.AF_NETLINK):
    try: socket.socket(family, socket.SOCK_RAW if family == socket.AF_NETLINK else 1); print("OPEN", family)
    except OSError: pass
for family, address in ((2, {server.getsockname()!r}), (2, ("8.8.8.8", 53)), (1, "\\0pipelinerl-{os.getpid()}")):
    try: socket.socket(family).connect(address); print("REACHED", address)
    except OSError: pass
{ASK}
print(said)
"""
        async with open_session() as session, record_agent(FakeLLM.saying(["hello"]), session) as agent:
            async with await JailWorkspace.make(template, agent, limits=SMALL) as workspace:
                outcome = await workspace.run(["python3", "-c", code], env=agent.variables)
        assert (outcome.stdout, outcome.stderr) == ("hello\n", "")
        assert len(agent.calls) == 1


async def test_snapshot_holds_files_and_links_and_restores_them(workspace):
    await workspace.run(["sh", "-c", "echo 2 >two.txt; chmod +x two.txt; mkfifo pipe; mkdir shut; chmod 0 shut"])
    content = await workspace.snapshot()
    await workspace.run(["sh", "-c", "rm -rf folder two.txt; echo 3 >one.txt; echo 4 >four.txt"])
    await workspace.restore(content)
    assert await output(workspace, "ls; cat folder/link; test -x two.txt && cat two.txt") == (
        "folder\none.txt\npipe\ntwo.txt\n1\n2\n"  # without what cannot be read
    )


async def test_what_an_agent_leaves_never_runs_or_is_followed_outside(workspace, tmp_path):
    """Links out of the folder stay links, owners and set-user bits are the workspace's own."""
    await workspace.run(["sh", "-c", "ln -s /etc/passwd out; cp /bin/true run; chmod 4755 run"])
    content = await workspace.snapshot()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getmember("./out").issym()
    await workspace.restore(content)
    assert await output(workspace, "test -u run && echo set; cat out 2>/dev/null") in ("", "set\n")  # its own user's


@pytest.mark.parametrize(
    "command",
    [
        "head -c 7M /dev/urandom >a; cp a b; ls -l >c",  # the folder is full
        "for i in $(seq 300); do mkdir -p d; cd d; done; echo deep >here",
        "i=0; while [ $i -lt 17000 ]; do : >f$i; i=$((i+1)); done",  # more files than there may be
    ],
)
async def test_whatever_fits_into_the_folder_can_be_copied(workspace, command):
    await workspace.run(["sh", "-c", command])
    content = await workspace.snapshot()
    async with await JailWorkspace.make(content, mode=workspace._mode, limits=SMALL) as copy:
        assert await output(copy, "find . | wc -l") == await output(workspace, "find . | wc -l")


async def test_sparse_files_larger_than_the_folder_are_not_copied(workspace):
    await workspace.run(["sh", "-c", "for i in 1 2 3 4; do truncate -s 8M f$i; done"])
    with pytest.raises(NotCopied, match="raise disk_mb"):
        await workspace.snapshot()


async def test_template_larger_than_the_folder_is_refused(tmp_path):
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    with pytest.raises(NotCopied, match="raise disk_mb"):
        await JailWorkspace.make(pack_folder(tmp_path), limits=SMALL)


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ("time", "import time; time.sleep(600)"),
        ("memory", "held = [bytearray(1 << 20) for _ in range(1000)]; print(len(held))"),
        ("output", "while True: print('x' * 1000)"),
    ],
)
async def test_command_is_ended_by_its_limit_and_the_workspace_goes_on(template, ended, code):
    async with await JailWorkspace.make(template, limits=replace(SMALL, wall_s=60.0)) as workspace:
        limits = replace(SMALL, wall_s=1.0) if ended == "time" else SMALL
        outcome, _ = await workspace.execute(["python3", "-c", code], b"", {}, limits)
        assert outcome.ended == ended
        assert await output(workspace, "cat one.txt") == "1\n"


async def test_connection_holds_no_more_than_is_counted(workspace):
    """The supervisor counts 320 kB for each of its two ends. Linux's own bounds allow megabytes."""
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0))
end, held = socket.create_connection(server.getsockname()), 0
end.settimeout(0.5)
try:
    while True: held += end.send(bytes(1 << 14))
except TimeoutError: print(held)
"""
    assert 0 < int((await workspace.run(["python3", "-c", code])).stdout) <= 640_000


@pytest.mark.parametrize("victim", ["jail", "supervisor"])
async def test_struck_workspace_raises(template, victim):
    async with await JailWorkspace.make(template, limits=SMALL) as workspace:
        running = asyncio.create_task(workspace.run(["sh", "-c", "touch begun; sleep 600"]))
        while "begun" not in await output(workspace, "ls"):  # ends: the other command writes it
            pass
        jail = psutil.Process(workspace._jail._process.pid)
        while len(jail.children()) > 1:  # the supervisor of `ls` ends
            pass
        (jail if victim == "jail" else jail.children()[0]).kill()
        with pytest.raises(VerifierError, match="was killed while sh ran"):
            await running
        if victim == "jail":
            with pytest.raises(VerifierError, match="the workspace is gone"):
                await workspace.run(["true"])


async def test_machine_without_a_jail_is_refused(template, monkeypatch):
    def no_jail(*_):
        raise OSError("no namespaces")

    jailed.usable_mode.cache_clear()
    monkeypatch.setattr(runner, "Jail", no_jail)
    with pytest.raises(VerifierError, match="programs cannot be isolated on this machine"):
        await JailWorkspace.make(template)


WORKER = """
import asyncio, sys
from pathlib import Path
from pipelinerl.domains.workspace import JailWorkspace, pack_folder
async def main():
    async with await JailWorkspace.make(pack_folder(Path(sys.argv[1]))) as workspace:
        running = asyncio.create_task(workspace.run(["sh", "-c", "setsid sleep 600 & touch begun; sleep 600"]))
        while "begun" not in (await workspace.run(["ls"])).stdout: pass
        print("begun", flush=True)
        await running
asyncio.run(main())
"""


@pytest.mark.slow
def test_killed_worker_leaves_neither_process_nor_file(tmp_path):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    template = tmp_path / "template"
    template.mkdir()
    command = [sys.executable, "-c", WORKER, str(template)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(temporary)}) as worker:
        assert worker.stdout.readline() == b"begun\n"
        started = psutil.Process(worker.pid).children(recursive=True)
        assert len(started) >= 5  # jail, supervisor, init, and two of the command
        worker.kill()
    assert psutil.wait_procs(started, timeout=60)[1] == []
    assert list(temporary.iterdir()) == list(template.iterdir()) == []


@pytest.mark.parametrize(
    ("left", "passed"),
    [
        ("def double(x): return 2 * x", 1),
        ("def double(x): return x", 0),
        ("import os; print(42); os._exit(0)\ndef double(x): return 2 * x", 0),
        ("import os; os.abort()", 0),
        ("import sys; sys.exit(0)", 0),
        ("while True: pass", 0),
    ],
)
async def test_hidden_test_is_passed_by_its_whole_output(tmp_path, left, passed):
    (tmp_path / "mine.py").write_text(left)
    test = HiddenTest(stdin="from mine import double\nprint(double(21))\nprint('end', double(1))", prints="42\nend 2")
    async with await JailWorkspace.make(pack_folder(tmp_path), limits=replace(SMALL, cpu_s=2)) as copy:
        assert await count_passed(copy, [test]) == passed


@pytest.mark.parametrize(
    ("then", "error"),
    [
        ("import os; os.kill(os.getpid(), 9)", VerifierError),
        ("raise SystemExit('no key')", DomainError),
        (ASK + "os.kill(os.getpid(), 9)", VerifierError),
    ],
)
async def test_agent_that_a_signal_ends_or_that_never_calls_has_no_reward(template, then, error):
    async def judge(_):
        raise AssertionError("nothing is judged")

    async with open_session() as session:
        with pytest.raises(error, match=r"signal ended python3|made no call .*no key"):
            await run_agent_in_workspace(FakeLLM.saying(["a"]), session, ["python3", "-c", then], template, judge)


async def test_failure_of_a_server_is_no_reward(template):
    async def judge(_):
        raise AssertionError("nothing is judged")

    def fail(_):
        raise VerifierError("of a server")

    command = ["python3", "-c", f"try:\n exec({ASK!r})\nexcept OSError: pass"]
    async with open_session() as session:
        with pytest.raises(VerifierError, match="of a server"):
            await run_agent_in_workspace(FakeLLM.saying(fail), session, command, template, judge)


async def test_agent_that_a_crash_interrupted_has_its_folder_again(template, tmp_path):
    """Its second life begins with the template, and makes of the recorded answers what the first one made."""
    ask = ASK.replace('"say"', "open('log').read() if os.path.exists('log') else '?'")
    turns = f"for _ in range(3):\n{textwrap.indent(ask, ' ')}\n print(said, file=open('log', 'a'))"
    logs = []

    async def judge(copy):
        logs.append((await copy.run(["cat", "log"])).stdout.split())
        return 1.0, True

    async def rollout(cfg, llm, problem, session):
        return await run_agent_in_workspace(llm, session, ["python3", "-c", turns], template, judge)

    async with open_session() as session, HoldingServer() as server:
        life = Life(tmp_path, session, server)
        await life.play(chat, function=rollout, die_at=2)
        ended = await life.play(chat, function=rollout)
    (played,) = ended.rollouts
    assert (played.answers_from_journal, played.diverged, len(server.requests)) == (2, False, 3 + 1)
    assert [len(log) for log in logs] == [3]


async def test_agent_that_leaves_too_much_is_judged_without_a_copy(template):
    async def judge(copy):
        return (0.5, False) if copy is None else (1.0, True)

    make = partial(JailWorkspace.make, limits=SMALL)
    command = ["python3", "-c", f"{ASK}\nfor i in range(4): os.truncate(os.open(f'f{{i}}', 65), 8 << 20)"]
    async with open_session() as session:
        result = await run_agent_in_workspace(FakeLLM.saying(["a"]), session, command, template, judge, make=make)
    assert result.metrics.reward == result.training_texts[0].reward == 0.5
