"""Tools of MCP servers: over a process's standard input and output, and over HTTP. Failing servers are no rewards."""

import itertools
import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf

from pipelinerl.actor.failures import classify
from pipelinerl.domains.contract import cfg_of_domains
from pipelinerl.domains.libraries import address_of, library
from pipelinerl.domains.libraries import mcp as mcp_tools
from pipelinerl.domains.libraries.mcp import Tools, generate_rollout, load_problems, open_tools, servers_of
from pipelinerl.errors import DomainError, ServerError
from pipelinerl.llm import FunctionCall, ToolCall
from pipelinerl.observability.logging import EventFormatter
from pipelinerl.testing import run_rollout
from tests.says import says

SECRET = "Bearer sk-planted-4711"
REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
SUMS = {
    "command": sys.executable,
    "args": ["-m", "tests.mcp_sums"],
    "env": {"PYTHONPATH": str(Path(__file__).parents[2])},
}
PROBLEM = {
    "dataset": "test", "task": "1 + 2?", "answer": "3", "servers": ["sums"], "max_turns": 4, "timeout_s": 200.0,
    "judge": None,
}  # fmt: skip


def config(server: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": REWARDS, "dataset_loader_params": {"servers": {"sums": server}}}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_policy_calls_a_tool_of_a_process_and_reads_what_it_refuses():
    replies = [call("add", a=1, b=2), call("add", a="x"), call("nope"), "<answer>3</answer>"]
    result = await run_rollout(generate_rollout, PROBLEM, replies, config(SUMS))
    assert (result.metrics.reward, result.metrics.success) == (1.0, True)
    counted = result.metrics.model_dump()
    assert (counted["num_tool_calls"], counted["num_tool_errors"]) == (3, 2)
    last = result.training_texts[-1].prompt_text
    assert "Adds two numbers." in last
    assert "tool\n3<" in last
    assert "error: there is no tool 'nope'" in last


@pytest.mark.parametrize(("tool", "says_what"), [("end", "Connection closed"), ("hang", "timed out")])
async def test_process_that_ends_or_hangs_is_a_failure_and_no_reward(tool: str, says_what: str):
    began = time.monotonic()
    async with open_tools(OmegaConf.create({}), {"sums": SUMS}, timeout_s=200.0):
        start_s = time.monotonic() - began
    limit = {"timeout_s": 1.0 + 3 * start_s} if tool == "hang" else {}  # its start must end in time, too
    with pytest.raises(Exception, match=says("MCP server 'sums'", says_what)) as raised:
        await run_rollout(generate_rollout, PROBLEM | limit, [call(tool), "<answer>3</answer>"], config(SUMS))
    assert classify(raised.value) == "transport"


async def test_server_that_is_down_or_broken_is_a_failure_and_a_missing_program_a_mistake():
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=500)

    app = web.Application()
    app.router.add_route("*", "/mcp", fail)
    async with TestServer(app) as broken:
        for server in ({"url": str(broken.make_url("/mcp"))}, {"url": "http://127.0.0.1:9/mcp"}, {"command": "false"}):
            with pytest.raises(Exception, match="did not answer") as raised:
                await run_rollout(generate_rollout, PROBLEM, ["<answer>3</answer>"], config(server))
            assert classify(raised.value) == "transport"
    with pytest.raises(DomainError, match=says("no such program", "no-such-program")) as missing:
        await run_rollout(generate_rollout, PROBLEM, ["x"], config({"command": "no-such-program"}))
    assert classify(missing.value) == "domain_error"


async def test_error_of_the_block_that_uses_tools_stays_what_it_is():
    failure = ServerError("the policy's server is down", 503)

    async def use_and_fail() -> None:
        async with open_tools(OmegaConf.create({}), {"sums": SUMS}) as tools:
            assert [tool["function"]["name"] for tool in tools.descriptions] == ["add", "end", "tell_key", "hang"]
            arguments = ToolCall(id="1", function=FunctionCall(name="add", arguments="[1, 2]"))
            assert await tools.call(arguments) == "error: the arguments are no JSON object"
            raise failure

    with pytest.raises(ServerError) as raised:
        await use_and_fail()
    assert raised.value is failure


async def test_two_servers_with_a_tool_of_one_name_are_refused():
    with pytest.raises(DomainError, match=says("'one'", "'two'", "add")):
        async with open_tools(OmegaConf.create({}), {"one": SUMS, "two": SUMS}):
            pass


async def test_servers_are_looked_up_by_name_and_must_be_the_same_in_all_domains():
    cfg = config({"command": "one"}) | {"domains": [{"dataset_loader_params": {"servers": {"more": {"url": "more"}}}}]}
    assert servers_of(OmegaConf.create(cfg), ["sums", "more"]) == {"sums": {"command": "one"}, "more": {"url": "more"}}
    with pytest.raises(DomainError, match=says("no server 'other'")):
        servers_of(OmegaConf.create(cfg), ["other"])
    cfg["domains"][0]["dataset_loader_params"] = {"servers": {"sums": {"command": "two"}}}
    with pytest.raises(DomainError, match=says("different servers 'sums'")):
        servers_of(OmegaConf.create(cfg), ["sums"])


async def test_tool_that_answers_with_the_secret_or_prints_it_reaches_neither_policy_nor_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("SUMS_KEY", SECRET)
    caplog.set_level("INFO")
    server = SUMS | {"env": {**SUMS["env"], "SUMS_KEY": {"env": "SUMS_KEY"}}}
    cfg = cfg_of_domains(config(server))
    result = await run_rollout(generate_rollout, PROBLEM, [call("tell_key"), "<answer>3</answer>"], cfg)
    assert "key is ***" in result.training_texts[-1].prompt_text
    assert SECRET not in result.training_texts[-1].prompt_text
    for thread in threading.enumerate():
        if thread.name == "sums's errors":
            thread.join(30)
    said = [record for record in caplog.records if "mcp_server_said server=sums" in record.getMessage()]
    assert any(SECRET in record.getMessage() for record in said)  # as a record, which is shown without it:
    shown = "\n".join(map(EventFormatter("actor_0").format, said))
    assert SECRET not in shown
    assert "key ***␛[31m" in shown


@pytest.mark.parametrize(("chars", "page", "listed"), [(0, 1, 100), (2**18, 1, 3), (2**18, 50, 3), (2**21, 1, 0)])
async def test_endless_list_of_tools_is_cut_and_warned_about_once(
    chars: int, page: int, listed: int, caplog: pytest.LogCaptureFixture
):
    names = itertools.count()

    def tool() -> Any:
        return SimpleNamespace(name=f"tool{next(names)}", description="x" * chars, input_schema={})

    class Endless:
        async def list_tools(self, cursor: str | None) -> Any:
            return SimpleNamespace(tools=[tool() for _ in range(page)], next_cursor="more")

    mcp_tools.warn_cut.cache_clear()
    for _ in range(2):
        tools = Tools({"endless": Endless()})
        await tools.list()
        assert len(tools.descriptions) == listed
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "event=tools_left_out server=endless limit_pages=100 limit_chars=1048576"
    ]


def test_problems_carry_names_of_servers(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 2?", "answer": "3"}\n')
    (one,) = load_problems([str(tmp_path / "rows.jsonl")], {"sums": SUMS}, max_turns=2)
    assert (one["task"], one["answer"], one["servers"], one["max_turns"]) == ("1 + 2?", "3", ["sums"], 2)


def test_address_is_of_one_of_the_runs_environments_or_given():
    jobs = [
        {"name": f"environment_{i}", "kind": "environment", "url": f"http://h:{i}", "environment_key": "sums"}
        for i in (1, 2)
    ]
    cfg = OmegaConf.create({"jobs": jobs})
    assert [address_of(cfg, "sums", replica=seed, own_path="/mcp") for seed in (0, 3)] == [
        "http://h:1/mcp", "http://h:2/mcp",
    ]  # fmt: skip
    assert address_of(cfg, "http://other/x", own_path="/mcp") == "http://other/x"
    with pytest.raises(DomainError, match=says("'games'", "environments")):
        address_of(cfg, "games")


def test_missing_library_names_its_extra():
    with pytest.raises(DomainError, match=says("no_such_library", "pipelinerl[games]")):
        library("no_such_library", "games")
