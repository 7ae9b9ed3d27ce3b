"""Tasks of ``reasoning-gym``: generated from a seed, and scored by the task's own function.

A problem only holds the task's settings, the seed and an index, from which the judging process generates the entry
again. About one entry in ten is held out for ``test``, by its question.
"""

import json
from functools import lru_cache
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.agents.run import in_thread
from pipelinerl.domains.datasets import is_held_out
from pipelinerl.domains.libraries import library
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, unparsable
from pipelinerl.rollouts import RolloutResult

gym = library("reasoning_gym", "reasoning-gym")
utils = library("reasoning_gym.utils", "reasoning-gym")

MAX_MISSES = 1000
"""A task is exhausted after this many entries in a row without a new problem."""
CACHED_TASKS = 256
"""More than the library's tasks for both parts, so that none is made again for every answer."""

required_problem_keys = ("task", "name", "settings", "index")


def load_problems(
    dataset_names: list[str],
    tasks: dict[str, dict[str, Any]],
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Generates the problems of ``train`` and ``test``: equally many of each task, no question twice.

    Args:
        dataset_names: any of ``train`` and ``test``.
        tasks: name of a task → its settings, as ``reasoning_gym.create_dataset`` takes them.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: seed of the entries of ``train``. ``test`` is the same for every seed.
    Raises:
        DomainError: the library has no such task or setting.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(
                f"reasoning-gym has no dataset {name!r}: use `train` or `test`, and name tasks in `tasks`"
            )
        wanted = num_test_problems if name == "test" else num_train_problems
        for place, (task, settings) in enumerate(tasks.items()):
            share = wanted // len(tasks) + (place < wanted % len(tasks))
            problems += draw_problems(task, dict(settings or {}), name, share, seed)
    return problems


def draw_problems(task: str, settings: dict[str, Any], part: str, wanted: int, seed: int) -> list[dict[str, Any]]:
    settings = {"seed": 0 if part == "test" else seed, "size": 20 * wanted + MAX_MISSES} | settings
    encoded = json.dumps(settings, sort_keys=True)
    problems: list[dict[str, Any]] = []
    asked: set[str] = set()
    misses = 0
    for index in range(settings["size"]):
        if len(problems) == wanted or misses == MAX_MISSES:
            break
        question = entries_of(task, encoded)[index]["question"]
        misses += 1
        if question not in asked and is_held_out(question) == (part == "test"):
            asked.add(question)
            problems.append({"dataset": part, "task": question, "name": task, "settings": encoded, "index": index})
            misses = 0
    return problems


@lru_cache(maxsize=CACHED_TASKS)
def entries_of(task: str, settings: str) -> Any:
    """Returns the task's entries. ``settings`` is JSON."""
    try:
        return gym.create_dataset(task, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise DomainError(f"reasoning-gym's task {task!r} with settings {settings}: {error}") from error


def judge(output: str, problem: dict[str, Any]) -> Verdict:
    """Judges the last answer in tags. A score between 0 and 1 is partial credit."""
    answer = utils.extract_answer(output)
    if answer is None:
        return no_answer()
    entries = entries_of(problem["name"], problem["settings"])
    try:
        score = float(entries.score_answer(answer, entries[problem["index"]]))
    except Exception as error:  # noqa: BLE001 — the task's own function, which this answer made fail
        return unparsable(f"{type(error).__name__}: {error}")
    return correct() if score >= 1 else Verdict(status="wrong", score=max(0.0, score))


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. ``actor.system_prompt`` replaces reasoning-gym's prompt."""

    async def judge_answer(output: str) -> Verdict:
        return await in_thread(judge, output, problem)

    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=problem["task"],
        judge=judge_answer,
        system_prompt=utils.SYSTEM_PROMPTS["default"],
    )
