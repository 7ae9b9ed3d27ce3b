"""Long answers: write out a walk around a ring of stations, lap by lap, clockwise. One wrong step makes it wrong.

The lengths of the walks have a heavy-tailed distribution.
"""

from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.datasets import Problem, generate_problems
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, unparsable, wrong
from pipelinerl.rollouts import RolloutResult

TAIL = 1.8
"""Exponent of the Pareto distribution of laps."""
WALKERS = ("Ada", "Ben", "Cem", "Dua", "Eva", "Finn")
CLOCKWISE, ANTICLOCKWISE = 1, -1


def question(laps: int, walker: str) -> str:
    return f"{walker}, walk {laps} laps clockwise."


def is_test_walk(laps: int, walker: str) -> bool:
    """Whether a question is held out for ``test``: for each number of laps, those to two of the six walkers."""
    return WALKERS.index(walker) % 3 == laps % 3


def walk(num_stations: int, laps: int, step: int) -> str:
    """Writes out a walk: one line per lap, numbered downwards, with every station that is passed.

    ``step``: CLOCKWISE (upwards from station 0) or ANTICLOCKWISE.
    """
    stations = " ".join(str(step * passed % num_stations) for passed in range(1, num_stations + 1))
    return "\n".join([*(f"lap {left}: {stations}" for left in range(laps, 0, -1)), "done"])


def load_problems(
    dataset_names: list[str],
    num_stations: int = 44,
    min_laps: int = 5,
    max_laps: int = 50,
    max_test_laps: int = 20,
    num_train_problems: int = 4096,
    num_test_problems: int = 96,
    seed: int = 0,
) -> list[Problem]:
    """Generates problems ``{"dataset", "num_stations", "laps", "walker"}``.

    Args:
        dataset_names: any of ``train`` and ``test``.
        num_stations: the ring's stations are 0 … num_stations - 1.
        min_laps: laps of the shortest walk. Half of the walks have more than 1.4 times as many.
        max_laps: laps of the longest walk of ``train``.
        max_test_laps: laps of the longest walk of ``test``. An evaluation holds weight updates back until it ends.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
    """

    def draw(rng: Random, held_out: bool) -> Problem:
        # a Pareto distribution that starts at `min_laps` and is cut
        laps = min(max_test_laps if held_out else max_laps, int(min_laps * (1 - rng.random()) ** (-1 / TAIL)))
        walker = rng.choice([name for name in WALKERS if is_test_walk(laps, name) == held_out])
        return {"num_stations": num_stations, "laps": laps, "walker": walker}

    return generate_problems(
        "laps",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )


required_problem_keys = ("num_stations", "laps", "walker")


def judge(output: str, problem: dict[str, Any]) -> Verdict:
    """The whole walk clockwise is correct, the whole walk anticlockwise wrong. Anything else is unparsable."""
    num_stations, laps = problem["num_stations"], problem["laps"]
    if output == walk(num_stations, laps, CLOCKWISE):
        return correct()
    if output == walk(num_stations, laps, ANTICLOCKWISE):
        return wrong("the other way round")
    return unparsable("not a walk of the wanted laps")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    task = question(problem["laps"], problem["walker"])
    return await ask_and_judge(cfg, llm, problem, session, task=task, judge=lambda output: judge(output, problem))
