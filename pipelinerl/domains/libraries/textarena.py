"""Games of ``textarena``: the policy plays seat 0, and a function of the user plays the other seats.

A game begins from a seed, which all attempts of a group share. The reward is the game's for seat 0; 1 or more is a
success.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.libraries import library, play, seeded_problems
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

ta = library("textarena", "textarena")

Player = Callable[[str], str]
"""Observation → action."""

POLICY = 0
"""The policy's seat."""

_seeding = threading.Lock()
"""Held while a game draws its start from Python's global random numbers, which are seeded for it."""

required_problem_keys = ("environment", "seed", "max_turns")


def load_problems(
    dataset_names: list[str],
    environments: dict[str, dict[str, Any]],
    num_players: int = 1,
    opponent: str | None = None,
    max_turns: int = 32,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Makes the problems of ``train`` and ``test``: environments in turn, each with a seed of its own.

    Args:
        dataset_names: any of ``train`` and ``test``, which share no seed.
        environments: name of a game → its settings, as ``textarena.make`` takes them.
        num_players: seats of a game.
        opponent: dotted name of a function from an observation to an action, which plays the other seats.
        max_turns: the policy's turns. A game that has not ended by then has reward 0.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: the first seed of ``train``.
    """
    if num_players > 1 and opponent is None:
        raise DomainError(f"num_players={num_players} needs `opponent`, a function that plays the other seats")
    rules = {"num_players": num_players, "opponent": opponent, "max_turns": max_turns}
    sizes = {"train": num_train_problems, "test": num_test_problems}
    return [problem | rules for problem in seeded_problems("textarena", dataset_names, environments, sizes, seed)]


class TextArenaGame:
    """A game with the interface of ``gymnasium.Env``, seen from seat 0.

    Args:
        name: name of the game. If it has a version without wrappers (``-raw``), that is played: its observations only
            hold what is new, since the conversation holds the rest.
        settings: settings of the game.
        num_players: number of seats.
        opponent: plays the other seats.
    """

    def __init__(self, name: str, settings: dict[str, Any], *, num_players: int = 1, opponent: Player | None = None):
        self._name, self._settings = name, settings
        self._num_players, self._opponent = num_players, opponent
        self._game: Any = None

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        known = ta.envs.registration.ENV_REGISTRY
        name = f"{self._name}-raw" if f"{self._name}-raw" in known else self._name
        self._game = ta.make(name, **self._settings)
        with _seeding:
            before = random.getstate()
            self._game.reset(num_players=self._num_players, seed=seed)
            random.setstate(before)
        return self._next_turn(False) or "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        done, _ = self._game.step(action=action)
        seen = self._next_turn(done)
        if seen is not None:
            return seen, 0.0, False, False, {}
        rewards, _ = self._game.close()
        reward = float(rewards[POLICY])
        return "", reward, True, False, {"success": reward >= 1}

    def _next_turn(self, done: bool) -> str | None:
        """Plays the other seats until it is the policy's turn. Returns its observation, or None if the game ended."""
        while not done:
            seat, seen = self._game.get_observation()
            if seat == POLICY:
                return as_text(seen)
            assert self._opponent is not None, "a game of several seats has an opponent"
            done, _ = self._game.step(action=self._opponent(as_text(seen)))
        return None


def as_text(seen: str | list[tuple[int, str, Any]]) -> str:
    """Returns the messages of an observation without the players' actions: the game reports their outcome."""
    if isinstance(seen, str):
        return seen
    return "\n".join(message for _, message, kind in seen if kind.name != "PLAYER_ACTION")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Plays one game. ``actor.system_prompt`` is the policy's system message."""
    opponent = problem["opponent"]
    game = TextArenaGame(
        problem["environment"],
        problem["settings"],
        num_players=problem["num_players"],
        opponent=resolve_function(opponent) if opponent else None,
    )
    return await play(cfg, llm, problem, session, game)
