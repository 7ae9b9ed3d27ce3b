"""Tasks with constraints on the answer, generated from a seed or read from files and the Hub, and their rollout.

One task has one answer, judged on its form. The share of constraints that hold gives partial credit.
"""

import contextlib
import json
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from examples.instructions.judge import CHECKS, judge
from pipelinerl.domains.columns import checked_columns, column, question_of, shown
from pipelinerl.domains.datasets import Problem, generate_problems
from pipelinerl.domains.rows import MAX_LEFT_OUT, UnusableRow
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

SUBJECTS = ("the sea", "bread", "a railway station", "winter", "glass", "maps", "a violin", "rain", "bees", "clocks")
HELD_OUT_SUBJECTS = ("a lighthouse", "salt", "bridges")
KEYWORDS = ("first", "because", "quiet", "old", "often", "light", "small", "however")


def draw_constraints(rng: Random, max_constraints: int) -> list[dict[str, Any]]:
    """Draws 1 … ``max_constraints`` constraints that one answer can satisfy together."""
    word, other = rng.sample(KEYWORDS, 2)
    at_least = rng.randrange(10, 60, 10)
    options: list[dict[str, Any]] = [
        {"check": "length", "unit": "words", "at_least": at_least, "at_most": at_least + rng.choice((10, 30))},
        {"check": "keyword", "word": word, "at_least": rng.randint(1, 2)},
        {"check": "forbidden", "word": other},
        {"check": "bullets", "at_least": rng.randint(2, 4), "at_most": 5},
        {"check": "no_commas"},
        {"check": "ends_with", "suffix": "That is all."},
    ]
    return rng.sample(options, rng.randint(1, max_constraints))


def sentence(constraint: dict[str, Any]) -> str:
    """Describes a generated constraint in words."""
    name = constraint["check"]
    if name == "length":
        return f"Use {constraint['at_least']} to {constraint['at_most']} {constraint['unit']}."
    if name == "keyword":
        return f"Use the word '{constraint['word']}' at least {constraint['at_least']} times."
    if name == "bullets":
        return f"Write {constraint['at_least']} to {constraint['at_most']} bullet points that begin with '- '."
    if name == "forbidden":
        return f"Do not use the word '{constraint['word']}'."
    return {"no_commas": "Use no commas.", "ends_with": "End with 'That is all.'"}[name]


def load_problems(
    dataset_names: list[str],
    max_constraints: int = 3,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    columns: dict[str, str] | None = None,
    seed: int = 0,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Loads problems ``{"dataset", "task", "constraints"}``.

    Args:
        dataset_names: ``train`` and ``test`` are generated. Other names are read (``pipelinerl.domains.datasets``).
        max_constraints: maximum per generated problem.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        columns: field → column of data sets that are read. Default: the first of
            ``pipelinerl.domains.columns``, and ``constraints`` (a list, or JSON).
        seed: of ``train``. ``test`` is the same for every seed.
        max_left_out: largest share of the rows read that may lack a question or its constraints. They are left out.
    """
    columns = checked_columns(columns, ("task", "constraints"))

    def draw(rng: Random, held_out: bool) -> Problem:
        constraints = draw_constraints(rng, max_constraints)
        subject = rng.choice(HELD_OUT_SUBJECTS if held_out else SUBJECTS)
        return {"task": " ".join([f"Write about {subject}.", *map(sentence, constraints)]), "constraints": constraints}

    return generate_problems(
        "instructions",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
        read=lambda row, _: read_problem(row, columns),
        max_left_out=max_left_out,
    )


def read_problem(row: dict[str, Any], columns: dict[str, str]) -> Problem:
    task = question_of(row, columns.get("task"))
    _, constraints = column(row, columns.get("constraints"), ("constraints",), "constraints")
    if isinstance(constraints, str):
        with contextlib.suppress(ValueError):
            constraints = json.loads(constraints)
    listed = constraints if isinstance(constraints, list) else []
    if not listed or not all(isinstance(c, dict) and str(c.get("check")) in CHECKS for c in listed):
        raise UnusableRow(
            "its constraints cannot be checked",
            f"they are {shown(constraints)}, not a list of objects whose `check` is one of {sorted(CHECKS)}",
        )
    # In Parquet every object has the keys of all objects, and the missing values are None.
    given = [{name: value for name, value in one.items() if value is not None} for one in listed]
    return {"task": task, "constraints": given}


required_problem_keys = ("task", "constraints")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=problem["task"],
        judge=lambda output: judge(output, problem["constraints"], {}),
    )
