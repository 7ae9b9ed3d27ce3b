"""Count how often a letter occurs in a word, which is invented from a seed. Train and test share no word."""

import re
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, wrong
from pipelinerl.rollouts import RolloutResult

ONSETS = ("b", "bl", "c", "cr", "d", "f", "g", "gr", "h", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
VOWELS = ("a", "e", "i", "o", "u", "ea", "oo", "ie")
CODAS = ("", "", "l", "ll", "n", "r", "rr", "s", "ss", "t", "tt")


def draw_word(rng: Random, max_syllables: int) -> str:
    count = rng.randint(2, max_syllables)
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))


def load_problems(
    dataset_names: list[str],
    max_syllables: int = 5,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    seed: int = 0,
) -> list[Problem]:
    """Generates problems ``{"dataset", "word", "letter", "count"}``. Four in five letters are drawn from the word.

    Args:
        dataset_names: any of ``train`` and ``test``.
        max_syllables: words have 2 … max_syllables.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
    """

    def draw(rng: Random, held_out: bool) -> Problem:
        while is_held_out(word := draw_word(rng, max_syllables)) != held_out:
            pass
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        return {"word": word, "letter": letter, "count": word.count(letter)}

    return generate_problems(
        "counting",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )


required_problem_keys = ("word", "letter", "count")
ANSWER = re.compile(r"<answer>\s*([0-9]{1,9})\s*</answer>")


def judge(output: str, count: int) -> Verdict:
    """Judges the last number in tags."""
    answers = ANSWER.findall(output)
    if not answers:
        return no_answer()
    return correct() if int(answers[-1]) == count else wrong()


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    task = (
        f"How often does the letter '{problem['letter']}' stand in '{problem['word']}'?"
        " Think step by step, then answer as <answer>number</answer>."
    )
    return await ask_and_judge(
        cfg, llm, problem, session, task=task, judge=lambda output: judge(output, problem["count"])
    )


generate_counting_rollout = generate_rollout
