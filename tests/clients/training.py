"""A domain: a client in all its ways answers the quickstart's questions, a question in each way.

Each rollout is a process of the clients' environment, behind a network that loses its first two connections. A client
that can cancels what it began first. The model calls one tool, two at once, or a tool beside the sub-agent.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from examples.largest_agent.domain import reward_of
from examples.largest_agent.model import SUBMIT, largest_agent
from pipelinerl.agents import record_agent
from pipelinerl.domains import largest
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.tiny_model.recipes import Messages, Recipe, Shape
from pipelinerl.world.process import kept
from tests.clients.network import unreliable
from tests.clients.programs import CRITIC, FOLDER, PROGRAMS, PYTHON, Program, run_behind

BASH = (
    '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ',
    '"}}</tool_call>',
)
ASK = ('<tool_call>{"name": "ask_critic", "arguments": {"input": "', '"}}</tool_call>')
POSITIONS = 16384
"""The prompts of smolagents and mini-swe-agent have thousands of tokens of the tiny model."""
NUMBER = re.compile(r"^\s*([0-9]{1,18})\s*$", re.MULTILINE)


def ways(package: str) -> dict[str, Program]:
    """A client's programs: an API each, streamed or not."""
    return {name: program for name, program in PROGRAMS.items() if program.package == package}


def recipe(tool: str, max_number: int = 30, steps: int = 300) -> Recipe:
    """Calls the client's tool with one or two of the numbers shown, or asks the critic about the one it submits."""
    call = SUBMIT if tool == "submit" else BASH
    made = replace(largest_agent(max_number, steps), shape=Shape(positions=POSITIONS), tags=(*call, *ASK))

    def conversation(rng: Random) -> Messages:
        if tool == "submit" and rng.random() < 0.2:
            asked = str(rng.randint(1, max_number))
            told = [{"role": "system", "content": CRITIC}, {"role": "user", "content": asked}]
            return [*told, {"role": "assistant", "content": "It may be right."}]
        shown, answered = made.conversation(rng)
        number = answered["content"].removeprefix(SUBMIT[0]).removesuffix(SUBMIT[1])
        other = rng.choice(re.findall(r"[0-9]+", shown["content"]))
        seconds = ["", other.join(call)] + ([number.join(ASK)] if tool == "submit" else [])
        return [shown, {"role": "assistant", "content": number.join(call) + rng.choice(seconds)}]

    return replace(made, conversation=conversation)


FORKS = str(FOLDER / "forks.py")


@contextmanager
def forks_of(package: str) -> Iterator[str]:
    """A process that has imported the client, from which those of the rollouts are forked: the path of its socket."""
    program = next(iter(ways(package).values()))
    with tempfile.TemporaryDirectory() as home:
        path = f"{home}/socket"
        server = subprocess.Popen(
            kept([PYTHON, "-E", FORKS, "serve", path, *program.imports], patience_s=0),
            env=program.variables(Path(home)) | {"PATH": home},
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield path
        finally:
            server.terminate()
            server.communicate()


def load_problems(dataset_names: list[str], package: str, forks: str, **params: Any) -> list[dict[str, Any]]:
    """A problem of the quickstart for each way of the client, so that every epoch has each of them once.

    Args:
        package: the client.
        forks: the socket of ``forks_of``.
    """
    problems = largest.load_problems(dataset_names, **params)
    return [
        problem | {"dataset": name, "forks": forks}
        for name, problem in zip(ways(package), Random(0).sample(problems, len(ways(package))), strict=True)
    ]


class ClientMetrics(BaseMetrics):
    """What a rollout went through, as the endpoint saw it."""

    num_cancelled: int
    """Calls whose client left before their answer."""
    num_repeated: int
    """Answered calls whose prompt was answered before."""
    num_parallel: int
    """Answers with several tool calls."""
    num_sub_agent: int
    """Answers to the sub-agent."""


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the client. The first number that it prints is the answer."""
    program = PROGRAMS[problem["dataset"]]
    arguments = [*program.arguments(problem["question"]), *(["--cancel"] if program.cancels else [])]
    command = [sys.executable, "-I", "-S", FORKS, "run", problem["forks"], *arguments]
    async with record_agent(llm, session) as agent:
        network = unreliable(agent.anthropic_base_url, lambda: llm.state.num_calls > 0, program.cancels)
        with tempfile.TemporaryDirectory() as home:
            # A shell has no programs, only what it brings: whatever the model makes it run is harmless.
            variables = program.variables(Path(home)) | {"PATH": home}
            async with network as url:
                printed = await run_behind(agent, url, command, problem["question"], variables)
        number = NUMBER.search(printed)
        reward, success = reward_of(int(number[1]) if number else None, problem["answer"])
        result = agent.result(reward=reward, success=success, dataset_name=problem["dataset"], no_answer=number is None)
        prompts = Counter(text.prompt_text for text in result.training_texts)
        metrics = ClientMetrics(
            **dict(result.metrics),
            num_cancelled=llm.state.num_calls - len(agent.calls),
            num_repeated=len(agent.calls) - len(prompts),
            num_parallel=sum(len(call.output.tool_calls or ()) > 1 for call in agent.calls),
            num_sub_agent=sum(CRITIC in text.prompt_text for text in result.training_texts),
        )
        return result.model_copy(update={"metrics": metrics})
