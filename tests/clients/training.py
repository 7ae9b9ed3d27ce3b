"""A domain: a client answers the quickstart's questions. Each rollout is a process of the clients' environment."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents import run_agent_process
from pipelinerl.domains import largest
from pipelinerl.domains.largest_agent.rollouts import reward_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.tiny_model.recipes import SUBMIT, Messages, Recipe, Shape, largest_agent
from tests.clients.programs import FOLDER, PROGRAMS, PYTHON, Program

BASH = (
    '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo ',
    '"}}</tool_call>',
)
POSITIONS = 16384
"""The prompts of smolagents and mini-swe-agent have thousands of tokens of the tiny model."""
NUMBER = re.compile(r"^\s*([0-9]{1,18})\s*$", re.MULTILINE)


def recipe(program: str, max_number: int = 30, steps: int = 300) -> Recipe:
    """Calls the client's tool with one of the numbers shown."""
    made = replace(largest_agent(max_number, steps), shape=Shape(positions=POSITIONS))
    if PROGRAMS[program].tool == "submit":
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
def forks_of(program: Program) -> Iterator[str]:
    """A process that has imported the client, from which those of the rollouts are forked: the path of its socket."""
    with tempfile.TemporaryDirectory() as home:
        path = f"{home}/socket"
        server = subprocess.Popen(
            [PYTHON, "-E", FORKS, "serve", path, *program.imports],
            env=program.variables(Path(home)) | {"PATH": home},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield path
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()


def load_problems(dataset_names: list[str], program: str, forks: str, **params: Any) -> list[dict[str, Any]]:
    """The quickstart's problems, for a client (key of ``PROGRAMS``) and the socket of ``forks_of``."""
    added = {"program": program, "forks": forks}
    return [problem | added for problem in largest.load_problems(dataset_names, **params)]


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs the client. The first number that it prints is the answer."""
    program = PROGRAMS[problem["program"]]

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
