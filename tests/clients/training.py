"""A domain: a client in all its ways answers the quickstart's questions, a question in each way.

Each rollout is a process of the clients' environment.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents import run_agent_process
from pipelinerl.domains import largest
from pipelinerl.domains.largest_agent.rollouts import reward_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.tiny_model.recipes import SUBMIT, Messages, Recipe, Shape, largest_agent
from pipelinerl.world.process import die_with_parent
from tests.clients.programs import FOLDER, PROGRAMS, PYTHON, Program

BASH = (
    '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ',
    '"}}</tool_call>',
)
POSITIONS = 16384
"""The prompts of smolagents and mini-swe-agent have thousands of tokens of the tiny model."""
NUMBER = re.compile(r"^\s*([0-9]{1,18})\s*$", re.MULTILINE)


def ways(package: str) -> dict[str, Program]:
    """A client's programs: an API each, streamed or not."""
    return {name: program for name, program in PROGRAMS.items() if program.package == package}


def recipe(tool: str, max_number: int = 30, steps: int = 300) -> Recipe:
    """Calls the client's tool with one of the numbers shown."""
    made = replace(largest_agent(max_number, steps), shape=Shape(positions=POSITIONS))
    if tool == "submit":
        return made

    def conversation(rng: Any) -> Messages:
        asked, answered = made.conversation(rng)
        return [
            asked,
            answered | {"content": answered["content"].replace(SUBMIT[0], BASH[0]).replace(SUBMIT[1], BASH[1])},
        ]

    return replace(made, tags=BASH, conversation=conversation)


FORKS = str(FOLDER / "forks.py")


@contextmanager
def forks_of(package: str) -> Iterator[str]:
    """A process that has imported the client, from which those of the rollouts are forked: the path of its socket."""
    program = next(iter(ways(package).values()))
    with tempfile.TemporaryDirectory() as home:
        path = f"{home}/socket"
        server = subprocess.Popen(
            [PYTHON, "-E", FORKS, "serve", path, *program.imports],
            env=program.variables(Path(home)) | {"PATH": home},
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL),
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield path
        finally:
            os.killpg(server.pid, signal.SIGKILL)
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


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the client. The first number that it prints is the answer."""
    program = PROGRAMS[problem["dataset"]]

    def judge(printed: str) -> tuple[float, bool]:
        number = NUMBER.search(printed)
        return reward_of(int(number[1]) if number else None, problem["answer"])

    with tempfile.TemporaryDirectory() as home:
        # A shell has no programs, only what it brings: whatever the model makes it run is harmless.
        return await run_agent_process(
            llm,
            session,
            [sys.executable, "-I", "-S", FORKS, "run", problem["forks"], *program.arguments(problem["question"])],
            judge,
            stdin=problem["question"],
            env=program.variables(Path(home)) | {"PATH": home},
            dataset_name=problem["dataset"],
        )
