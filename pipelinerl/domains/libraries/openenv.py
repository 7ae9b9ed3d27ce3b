"""Environment servers of OpenEnv (package ``openenv``), the run's own or others, over their web socket.

Every rollout has a session of its own at one server. An action that the server finds invalid ends the episode. Any
other error counts as a failure of the server, without a reward.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import backoff_s
from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.libraries import address_of, asking, library, play, seeded_problems, served
from pipelinerl.errors import DomainError, ServerError, TransportError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

client_module = library("openenv.core.generic_client", "openenv")
websockets = library("websockets.exceptions", "openenv")

CAPACITY, INVALID = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Error codes of a server: no session is left; the request is invalid."""
FIRST_DELAY_S = 0.2
"""Seconds before the first repetition at a server without a free session."""
WAIT_S = 60.0
"""Seconds that a rollout waits for a session. A longer shortage needs more replicas or less concurrency."""

required_problem_keys = ("environment", "seed", "max_turns")


def load_problems(
    dataset_names: list[str],
    environments: dict[str, dict[str, Any]],
    action_field: str = "message",
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
        environments: key of one of the run's ``environments``, or address of another server → arguments of its
            ``reset`` besides the seed.
        action_field: field of the action that holds the text.
        parse_action: dotted name of a function from a text to a whole action, or to None where the text is invalid.
        show: dotted name of a function from an observation (a mapping) to a text. By default its only field, or JSON.
        max_turns: longest episode.
        invalid_reward: reward of an invalid action.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: the first seed of ``train``.
    """
    rules = {
        "action_field": action_field,
        "parse_action": parse_action,
        "show": show,
        "max_turns": max_turns,
        "invalid_reward": invalid_reward,
    }
    sizes = {"train": num_train_problems, "test": num_test_problems}
    return [problem | rules for problem in seeded_problems("openenv", dataset_names, environments, sizes, seed)]


class OpenEnvServer:
    """An entry of ``environments`` that serves an OpenEnv application as part of the run.

    Args:
        app: ``package.module:name`` of the application that ``create_app`` made.
    """

    def __init__(self, app: str):
        self._app = app

    def launch(self, port: int, host: str = "127.0.0.1") -> None:
        """Serves until the process is told to stop."""
        import uvicorn

        uvicorn.run(served(self._app, "app"), host=host, port=port, access_log=False)


class OpenEnvSession:
    """One episode at a server, with the interface of ``gymnasium.Env``. ``close`` it.

    Args:
        url: URL of the server.
        settings: arguments of ``reset`` besides the seed.
        parse_action: text → action, or None.
        show: observation → text.
        invalid_reward: reward of an invalid action.
    """

    def __init__(
        self,
        url: str,
        settings: dict[str, Any],
        parse_action: Callable[[str], dict[str, Any] | None],
        show: Callable[[dict[str, Any]], str],
        invalid_reward: float,
    ):
        self._url, self._settings = url, settings
        self._parse_action, self._show, self._invalid_reward = parse_action, show, invalid_reward
        self._client: Any = client_module.GenericEnvClient(base_url=url)

    async def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Begins the episode. Waits up to ``WAIT_S`` for a free session."""
        deadline = time.monotonic() + WAIT_S
        for repetition in itertools.count():
            try:
                result = await self._ask(self._client.reset, seed=seed, **self._settings)
                break
            except NoSessionError:
                await self.close()
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(backoff_s(repetition, FIRST_DELAY_S))
        return self._show(result.observation), {}

    async def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        action = self._parse_action(text)
        try:
            result = None if action is None else await self._ask(self._client.step, action)
        except InvalidRequestError:
            result = None
        if result is None:
            return "", self._invalid_reward, True, False, {"success": False}
        return self._show(result.observation), float(result.reward or 0.0), result.done, False, {}

    async def close(self) -> None:
        await self._client.disconnect()

    async def _ask(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            with asking(f"the OpenEnv server {self._url}", websockets.WebSocketException):
                return await method(*args, **kwargs)
        except TransportError as error:
            if method == self._client.reset and isinstance(error.__cause__, websockets.ConnectionClosedOK):
                raise NoSessionError(str(error), 503) from error  # it closed before its error arrived
            raise
        except RuntimeError as error:  # the server answered with an error
            said = str(error)
            if f"(code: {CAPACITY})" in said:
                raise NoSessionError(said, 503) from error
            if f"(code: {INVALID})" in said:
                raise InvalidRequestError(f"the OpenEnv server {self._url}: {said}") from error
            raise ServerError(f"the OpenEnv server {self._url} failed: {said}", 500) from error


class NoSessionError(ServerError):
    """The server has no session left."""


class InvalidRequestError(DomainError):
    """The server refuses the action, or the arguments of ``reset``."""


def as_text(observation: dict[str, Any]) -> str:
    """Returns the only field of an observation, or all of it as JSON."""
    if len(observation) == 1 and isinstance(only := next(iter(observation.values())), str):
        return only
    return json.dumps(observation, ensure_ascii=False)


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Plays one episode. ``actor.system_prompt`` is the policy's system message and should name the actions."""
    field, parse, show = problem["action_field"], problem["parse_action"], problem["show"]
    episode = OpenEnvSession(
        address_of(cfg, problem["environment"], replica=problem["seed"]),
        problem["settings"],
        resolve_function(parse) if parse else lambda text: {field: text.strip()},
        resolve_function(show) if show else as_text,
        problem["invalid_reward"],
    )
    try:
        return await play(cfg, llm, problem, session, episode)
    finally:
        await episode.close()
