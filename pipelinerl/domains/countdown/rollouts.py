"""Countdown problems, generated from a seed, and their rollout: one answer, which is an expression."""

from fractions import Fraction
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.countdown.judge import judge
from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

MAX_TRIES = 1000
"""Draws without a new problem, after which all are taken to be drawn."""


def is_test_problem(numbers: list[int], target: int) -> bool:
    """Whether a problem is held out. The order of its numbers does not matter."""
    return is_held_out(repr((sorted(numbers), target)))


def apply(operator: str, left: Fraction, right: Fraction) -> Fraction | None:
    """Returns the result if it is a positive whole number, as the game requires at every step, else None."""
    if operator == "/" and right == 0:
        return None
    value = {
        "+": lambda: left + right,
        "-": lambda: left - right,
        "*": lambda: left * right,
        "/": lambda: left / right,
    }[operator]()
    return value if value.denominator == 1 and value > 0 else None


def draw_target(rng: Random, numbers: list[int], operators: str) -> int | None:
    """Returns the value of a random expression that uses every number once. None: a step broke the game's rule."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        left, right = (values.pop(rng.randrange(len(values))) for _ in range(2))
        value = apply(rng.choice(operators), left, right)
        if value is None:
            return None
        values.append(value)
    return int(values[0])


def load_problems(
    dataset_names: list[str],
    num_numbers: tuple[int, int] = (3, 4),
    max_number: int = 99,
    max_target: int = 999,
    operators: str = "+-*/",
    use_all: bool = True,
    num_train_problems: int = 20_000,
    num_test_problems: int = 512,
    seed: int = 0,
) -> list[Problem]:
    """Generates solvable problems ``{"dataset", "numbers", "target", "use_all"}`` without repetition.

    Args:
        dataset_names: any of ``train`` and ``test``.
        num_numbers: minimum and maximum count of numbers in a problem.
        max_number: numbers are drawn from 1 … max_number.
        max_target: largest target.
        operators: the operators of ``+-*/`` that the generator uses. The player may always use all four.
        use_all: whether an answer must use every number.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
    """
    seen: set[tuple[tuple[int, ...], int]] = set()

    def draw(rng: Random, held_out: bool) -> Problem | None:
        drawn = draw_problem(rng, tuple(num_numbers), max_number, max_target, operators, held_out, seen)
        if drawn is None:
            return None
        numbers, target = drawn
        seen.add((tuple(sorted(numbers)), target))
        return {"numbers": numbers, "target": target, "use_all": use_all}

    return generate_problems(
        "countdown",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )


def draw_problem(
    rng: Random,
    num_numbers: tuple[int, ...],
    max_number: int,
    max_target: int,
    operators: str,
    held_out: bool,
    seen: set[tuple[tuple[int, ...], int]],
) -> tuple[list[int], int] | None:
    """Draws a new problem of the wanted part. None after ``MAX_TRIES`` failures."""
    for _ in range(MAX_TRIES):
        numbers = [rng.randint(1, max_number) for _ in range(rng.randint(*num_numbers))]
        target = draw_target(rng, numbers, operators)
        if target is None or target > max_target or target in numbers or (tuple(sorted(numbers)), target) in seen:
            continue
        if is_test_problem(numbers, target) == held_out:
            return numbers, target
    return None


required_problem_keys = ("numbers", "target", "use_all")


def question(numbers: list[int], target: int, use_all: bool) -> str:
    listed = ", ".join(map(str, numbers))
    use = "every number once" if use_all else "each number at most once"
    return f"Make {target} from {listed}. Use {use} and + - * / ( ). Answer as <answer>expression</answer>."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=question(problem["numbers"], problem["target"], problem["use_all"]),
        judge=lambda output: judge(output, problem, {"use_all": problem["use_all"]}),
    )
