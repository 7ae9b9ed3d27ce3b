"""What the best answers without reading earn on held-out problems, and that the recipes' pages have these figures."""

import re
import statistics
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from examples.arithmetic import arithmetic
from examples.tools import tools
from examples.tools.agent import calculate
from examples.words import words
from pipelinerl.domains.datasets import Problem
from pipelinerl.domains.guessing import final_reward, numbers_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def one_number(problems: list[Problem]) -> float:
    answers = [problem["answer"] for problem in problems]
    return answers.count(statistics.mode(answers)) / len(answers)


def fixed_operators(problems: list[Problem], mean: bool = False) -> float:
    """Success of the same operators for every story, of two and of three numbers. ``mean``: drawn by chance."""
    total = 0.0
    for places in (1, 2):
        stories = [
            (re.findall(r"\d{3}", problem["question"]), problem["answer"])
            for problem in problems
            if len(re.findall(r"\d{3}", problem["question"])) == places + 1
        ]
        right = [
            sum(calculate(tools.joined(list(map(int, numbers)), operators)) == answer for numbers, answer in stories)
            for operators in product("+-*", repeat=places)
        ]
        total += statistics.fmean(right) if mean else max(right)
    return total / len(problems)


@cache
def legal_play(below: int, above: int, turn: int) -> tuple[float, float]:
    """(success, reward) of a guess drawn from what is left: that many numbers on each side of the hidden one."""
    if turn == 8:
        return 0.0, final_reward(turn, "missed")
    found = [(1.0, final_reward(turn, "hit"))]
    found += [legal_play(left, above, turn + 1) for left in range(below)]
    found += [legal_play(below, left, turn + 1) for left in range(above)]
    return statistics.fmean(s for s, _ in found), statistics.fmean(r for _, r in found)


def bisection(number: int) -> float:
    """Reward of a game that guesses the middle of what is left, rounded down, from 1 to 128."""
    low, high = 1, 128
    for turn in range(8):
        guess = (low + high) // 2
        if guess == number:
            return final_reward(turn, "hit")
        low, high = (guess + 1, high) if number > guess else (low, guess - 1)
    return final_reward(8, "missed")


def of_words() -> list[float]:
    lengths = [problem["length"] for problem in words.load_problems(["test"])]
    rewards = {written: statistics.fmean(words.reward(asked, written) for asked in lengths) for written in range(1, 20)}
    best = max(rewards, key=rewards.__getitem__)
    assert best == 7
    return [rewards[best], lengths.count(best) / len(lengths)]


def of_guessing() -> list[float]:
    numbers = numbers_of("test", 128)
    success, reward = zip(*(legal_play(number - 1, 128 - number, 0) for number in numbers), strict=True)
    return [*map(statistics.fmean, (success, reward)), statistics.fmean(map(bisection, numbers))]


@pytest.mark.parametrize(
    ("recipe", "figures", "places"),
    [
        ("words", of_words, 3),
        ("arithmetic", lambda: [one_number(arithmetic.load_problems(["test"]))], 3),
        ("guessing_smollm2", of_guessing, 2),
        (
            "tools",
            lambda: [
                one_number(tools.load_problems(["test"])),
                fixed_operators(tools.load_problems(["test"])),
                fixed_operators(tools.load_problems(["test"]), mean=True),
            ],
            3,
        ),
    ],
)
def test_page_has_what_the_best_trivial_answers_earn(
    recipe: str, figures: Callable[[], list[float]], places: int
) -> None:
    page = (EXAMPLES / recipe / "README.md").read_text()
    for figure in figures():
        assert re.search(rf"(?<!\d)0?{re.escape(f'{figure:.{places}f}'.lstrip('0'))}(?!\d)", page), figure
