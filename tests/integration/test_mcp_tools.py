"""Tools of MCP servers: over a process's standard input and output, and over HTTP. Failing servers are no rewards."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from omegaconf import OmegaConf

from pipelinerl.actor.failures import DOMAIN, TRANSPORT, classify
from pipelinerl.domains.libraries import address_of, library
from pipelinerl.domains.libraries.mcp import generate_rollout, load_problems, open_tools
from pipelinerl.errors import DomainError, ServerError
from pipelinerl.llm import FunctionCall, ToolCall
from pipelinerl.testing import run_rollout
from tests.says import says

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
CFG = {"rewards": REWARDS}
SUMS = {
    "command": sys.executable,
    "args": ["-m", "tests.mcp_sums"],
    "env": {"PYTHONPATH": str(Path(__file__).parents[2])},
}


def problem(**servers: dict[str, Any]) -> dict[str, Any]:
    return {
        "dataset": "test", "task": "1 + 2?", "answer": "3", "servers": servers, "max_turns": 4, "timeout_s": 200.0,
        "judge": None,
    }  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_policy_calls_a_tool_of_a_process_and_reads_what_it_refuses():
    replies = [call("add", a=1, b=2), call("add", a="x"), call("nope"), "<answer>3</answer>"]
    result = await run_rollout(generate_rollout, problem(sums=SUMS), replies, CFG)
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
    async with open_tools(OmegaConf.create(CFG), {"sums": SUMS}, timeout_s=200.0):
        start_s = time.monotonic() - began
    limit = {"timeout_s": 1.0 + 5 * start_s} if tool == "hang" else {}  # its start must end in time, too
    with pytest.raises(Exception, match=says("MCP server 'sums'", says_what)) as raised:
        await run_rollout(generate_rollout, problem(sums=SUMS) | limit, [call(tool), "<answer>3</answer>"], CFG)
    assert classify(raised.value) == TRANSPORT


async def test_server_that_is_down_or_broken_is_a_failure_and_a_missing_program_a_mistake():
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=500)

    app = web.Application()
    app.router.add_route("*", "/mcp", fail)
    async with TestServer(app) as broken:
        for server in ({"url": str(broken.make_url("/mcp"))}, {"url": "http://127.0.0.1:9/mcp"}, {"command": "false"}):
            with pytest.raises(Exception, match="did not answer") as raised:
                await run_rollout(generate_rollout, problem(one=server), ["<answer>3</answer>"], CFG)
            assert classify(raised.value) == TRANSPORT
    with pytest.raises(DomainError, match=says("no such program", "no-such-program")) as missing:
        await run_rollout(generate_rollout, problem(one={"command": "no-such-program"}), ["x"], CFG)
    assert classify(missing.value) == DOMAIN


async def test_error_of_the_block_that_uses_tools_stays_what_it_is():
    failure = ServerError("the policy's server is down", 503)

    async def use_and_fail() -> None:
        async with open_tools(OmegaConf.create({}), {"sums": SUMS}) as tools:
            assert [tool["function"]["name"] for tool in tools.descriptions] == ["add", "end", "hang"]
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


def test_problems_carry_the_servers(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 2?", "answer": "3"}\n')
    (one,) = load_problems([str(tmp_path / "rows.jsonl")], {"sums": SUMS}, max_turns=2)
    assert (one["task"], one["answer"], one["servers"], one["max_turns"]) == ("1 + 2?", "3", {"sums": SUMS}, 2)


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
