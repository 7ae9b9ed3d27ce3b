"""Environments of ``verifiers`` (``verifiers.v1``): its tasks, programs, tool servers and rewards.

A rollout is an episode of the library against an endpoint that records the policy, and its reward is the library's. An
error that the library records on a trace ends the rollout: with ``DomainError`` for the task's code, else with an
infrastructure error, and the attempt is repeated.

The library's own programs run in a process each. ``ChatHarness``, the default here, is the same chat loop without one.
"""

import asyncio
import contextlib
import json
import sys
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from omegaconf import DictConfig
from pydantic import ConfigDict

from pipelinerl.agents import record_agent
from pipelinerl.agents.run import in_thread
from pipelinerl.domains.datasets import is_held_out
from pipelinerl.domains.libraries import library
from pipelinerl.domains.libraries.mcp import open_tools
from pipelinerl.errors import DomainError, PipelineRLError, ServerError, TransportError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

vf = library("verifiers.v1", "verifiers")
loaders = library("verifiers.v1.utils.loaders", "verifiers")
wire = library("verifiers.v1.dialects.chat", "verifiers")
openai = library("openai", "verifiers")

__all__ = ["ChatHarness", "generate_rollout", "load_problems"]

HARNESS = "pipelinerl"
"""Name of ``ChatHarness`` in the library's configurations."""
NO_KEY_VARIABLE = "PIPELINERL_NO_API_KEY"
"""A variable that is never set: the library reads a key from a variable, but ours is a header."""
OF_THE_TASK = ("TaskError", "EnvError")
"""Errors of the environment's own code."""

required_problem_keys = ("env", "data")


def load_problems(
    dataset_names: list[str],
    env: dict[str, Any],
    test_env: dict[str, Any] | None = None,
    num_train_problems: int | None = None,
    num_test_problems: int | None = None,
    success_reward: float = 1.0,
) -> list[dict[str, Any]]:
    """Loads the tasks of an environment.

    Args:
        dataset_names: any of ``train`` and ``test``.
        env: the library's block ``env``: ``{"taskset": {"id": …}, "agent": {…}}``. An agent is played on this machine
            by ``ChatHarness`` unless it says otherwise.
        test_env: the block for ``test``. None: about one task in ten is held out, by its content.
        num_train_problems: size of ``train``. None: all.
        num_test_problems: size of ``test``. None: all.
        success_reward: minimum reward of a success.
    Raises:
        DomainError: the block is not valid, or a taskset without an end has no size.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"verifiers has no dataset {name!r}: use `train` or `test`")
        block = test_env if name == "test" and test_env else env
        limit = num_test_problems if name == "test" else num_train_problems
        encoded = json.dumps(block, sort_keys=True)
        taskset = make_env(encoded).taskset
        if limit is None and not taskset.bounded:
            raise DomainError(f"the taskset {taskset.config.id!r} has no end: set num_{name}_problems")
        found = 0
        for task in taskset:
            if found == limit:
                break
            if test_env or is_held_out(task.key) == (name == "test"):
                data = task.data.model_dump(mode="json")
                problems.append({"dataset": name, "env": encoded, "data": data, "success_reward": success_reward})
                found += 1
    return problems


@lru_cache(maxsize=16)
def config_of(block: str) -> Any:
    """Returns the library's configuration of an environment. ``block`` is JSON."""
    given = json.loads(block)
    try:
        config = loaders.resolve_env_config(given)
        for seat, spec in config:
            if isinstance(spec, vf.AgentConfig):
                asked = given.get(seat) or {}
                missing = {key: value for key, value in DEFAULTS.items() if key not in asked}
                given[seat] = missing | asked
        return loaders.resolve_env_config(given)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise DomainError(f"verifiers refuses the environment {block}: {error}") from error


DEFAULTS: dict[str, Any] = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}


def make_env(block: str) -> Any:
    return loaders.load_environment(config_of(block))


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Future[Any]]] = WeakKeyDictionary()
_serving: set[asyncio.Task[None]] = set()


async def shared_tools(block: str) -> Any:
    """Returns the tool servers that all rollouts of this worker share. They end with the worker's event loop."""
    servers = _shared.setdefault(asyncio.get_running_loop(), {})
    if block not in servers:
        servers[block] = ready = asyncio.get_running_loop().create_future()

        async def serve() -> None:
            try:
                async with make_env(block).shared_tools() as tools:
                    ready.set_result(tools)
                    await asyncio.Event().wait()
            except Exception as error:  # noqa: BLE001 — the waiting rollouts raise it
                servers.pop(block, None)
                if not ready.done():
                    ready.set_exception(TransportError(f"the shared tools of {block} did not start: {error}"))

        task = asyncio.create_task(serve())
        _serving.add(task)
        task.add_done_callback(_serving.discard)
    return await asyncio.shield(servers[block])


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[name-defined]
    """The library's chat loop with tools, in this process: the model is asked until it calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        asked = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else map(wire.message_to_wire, prompt or [])
        )
        messages = [*([{"role": "system", "content": system}] if system else []), *asked]
        servers = {name: {"url": url} for name, url in mcp_urls.items()}
        http_client = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)  # on loopback
        try:
            async with (
                openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, http_client=http_client) as client,
                open_tools(DictConfig({}), servers, timeout_s=self.config.tool_timeout) as tools,
            ):
                offered = {"tools": tools.descriptions} if tools.descriptions else {}
                while True:
                    answer = await client.chat.completions.create(model=ctx.model, messages=messages, **offered)
                    message = answer.choices[0].message
                    messages.append(message.model_dump(exclude_none=True))
                    for call in message.tool_calls or []:
                        said = await tools.call(call)
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
                    if not message.tool_calls:
                        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
        except openai.APIError as error:  # also how the library refuses a further turn
            return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))


# The library looks programs up in its own folder, or at the top of the import path.
sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = sys.modules[__name__]


class EpisodeMetrics(BaseMetrics):
    """The library's rewards and metrics, by their names."""

    model_config = ConfigDict(extra="allow")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Plays one episode."""
    env = await in_thread(make_env, problem["env"])
    tools = await shared_tools(problem["env"])
    env.shared_tools = lambda: contextlib.nullcontext(tools)
    task_type = type(env.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(problem["data"]), env.config.taskset.task)
    async with record_agent(llm, session) as agent:
        client = vf.EvalClientConfig(
            base_url=agent.base_url, api_key_var=NO_KEY_VARIABLE, headers={"x-api-key": agent.api_key}
        )
        async with env.serving():
            episode = await env.run_episode(task, vf.ModelContext(model=agent.model, client=client))
        if agent.failure is not None:
            raise agent.failure
        trace = trained_trace(episode, agent.base_url)
        result = agent.result(
            reward=trace.reward, success=trace.reward >= problem["success_reward"], dataset_name=problem["dataset"]
        )
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    own = {f"reward_{name}": value for name, value in rewards.items()} | trace.metrics
    result.metrics = EpisodeMetrics(**own | result.metrics.model_dump())
    return result


def trained_trace(episode: Any, policy_url: str) -> Any:
    """Returns the trace of the policy.

    Raises:
        TransportError, TimeoutError: the episode failed for reasons other than its code.
        DomainError: its code failed, or it has several agents that are, or would be, trained.
    """
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if errors:
        late = episode.is_timeout or any(trace.is_timeout for trace in episode.traces)
        raise as_error(errors[-1].type, errors[-1].message, errors[-1].status_code, late)
    trained: list[Any] = []
    others: list[Any] = []
    for trace in episode.traces:
        (trained if trace.agent is None or trace.agent.trainable else others).append(trace)
    if len(trained) != 1:
        raise DomainError(f"the episode has {len(trained)} trained agents: a rollout has one reward, so it needs one")
    for trace in others:
        if trace.agent.config.client.base_url == policy_url:
            raise DomainError(
                f"the seat {trace.agent.name!r} would be played by the policy: give it `client` and `model`"
            )
    return trained[0]


def as_error(kind: str, message: str, status: int | None, late: bool) -> PipelineRLError | TimeoutError:
    """Returns our error for one that the library recorded."""
    said = f"verifiers recorded {kind}: {message}"
    if kind in OF_THE_TASK:
        return DomainError(said)
    if late:
        return TimeoutError(said)
    return ServerError(said, status) if kind == "ProviderError" and status else TransportError(said)
