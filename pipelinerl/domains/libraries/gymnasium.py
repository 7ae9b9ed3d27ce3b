"""Environments of ``gymnasium`` with actions that a text can name. Observations are shown as text.

An episode begins from a seed, which all attempts of a group share. A text that names no action ends it.
"""

import re
from collections.abc import Callable
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents.run import in_thread
from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.libraries import library, play, seeded_problems
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

gym = library("gymnasium", "gymnasium")

NUMBER = re.compile(r"-?\d{1,9}")

required_problem_keys = ("environment", "seed", "max_turns")


def load_problems(
    dataset_names: list[str],
    environments: dict[str, dict[str, Any]],
    parse_action: str | None = None,
    show: str | None = None,
    max_turns: int = 32,
    invalid_reward: float = -1.0,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Makes the problems of ``train`` and ``test``: environments in turn, each with a seed of its own.

    Args:
        dataset_names: any of ``train`` and ``test``, which share no seed.
        environments: name of an environment → its settings, as ``gymnasium.make`` takes them.
        parse_action: dotted name of a function from a text to an action, or to None where the text names none. By
            default the last number is the action in a ``Discrete`` space, and the text in a ``Text`` space.
        show: dotted name of a function from an observation to a text. By default ``str``.
        max_turns: longest episode.
        invalid_reward: reward of a text that names no action.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: the first seed of ``train``.
    """
    rules = {"parse_action": parse_action, "show": show, "max_turns": max_turns, "invalid_reward": invalid_reward}
    sizes = {"train": num_train_problems, "test": num_test_problems}
    return [problem | rules for problem in seeded_problems("gymnasium", dataset_names, environments, sizes, seed)]


class TextActions:
    """A ``gymnasium.Env`` whose actions and observations are texts.

    Args:
        environment: ``gymnasium.Env``.
        parse_action: text → action, or None.
        show: observation → text.
        invalid_reward: reward of a text that names no action.
    """

    def __init__(
        self,
        environment: Any,
        parse_action: Callable[[str], Any],
        show: Callable[[Any], str] = str,
        invalid_reward: float = -1.0,
    ):
        self._environment, self._parse_action = environment, parse_action
        self._show, self._invalid_reward = show, invalid_reward

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        observation, info = self._environment.reset(seed=seed)
        return self._show(observation), info

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        action = self._parse_action(text)
        if action is None:
            return "", self._invalid_reward, True, False, {"success": False}
        observation, reward, terminated, truncated, info = self._environment.step(action)
        return self._show(observation), float(reward), terminated, truncated, info


def action_parser(space: Any) -> Callable[[str], Any]:
    """Returns the function from a text to an action. Raises ``DomainError`` for a space whose actions are not texts."""
    if isinstance(space, gym.spaces.Text):
        return str.strip
    if isinstance(space, gym.spaces.Discrete):

        def last_number(text: str) -> int | None:
            found = NUMBER.findall(text)
            return int(found[-1]) if found and space.contains(int(found[-1])) else None

        return last_number
    raise DomainError(
        f"a text names no action of {space}: set dataset_loader_params.parse_action to a function of yours"
    )


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Plays one episode. ``actor.system_prompt`` is the policy's system message and should name the actions."""
    environment = await in_thread(gym.make, problem["environment"], **problem["settings"])
    try:
        parse, show = problem["parse_action"], problem["show"]
        texts = TextActions(
            environment,
            resolve_function(parse) if parse else action_parser(environment.action_space),
            resolve_function(show) if show else str,
            problem["invalid_reward"],
        )
        return await play(cfg, llm, problem, session, texts)
    finally:
        await in_thread(environment.close)
