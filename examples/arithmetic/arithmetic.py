"""Sums in words with one or two operations: imitation of the form first, then reinforcement learning.

python -m examples.arithmetic.arithmetic --rows 600 --seed 0 > results/arithmetic.jsonl    conversations to imitate
"""

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import aiohttp
from omegaconf import DictConfig

from examples.imitation import print_conversations
from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, wrong
from pipelinerl.rollouts import RolloutResult

NAMES = ("Ada", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jack", "Kira", "Liam")
THINGS = ("apples", "books", "cards", "coins", "eggs", "flowers", "keys", "nuts", "pens", "shells", "stamps", "stones")
MORE = ("{name} finds {n} more.", "{name} buys {n} more.", "A friend brings {n} more.")
FEWER = ("{name} gives {n} away.", "{name} loses {n} of them.", "A friend takes {n} of them.")
ANSWER = re.compile(r"answer is\s*(-?\d{1,9})\b")
FORM = "Write down each calculation and end with: The answer is N."

Step = tuple[int, str, int, int]
"""left, operation, right, result"""


def draw_story(rng: Random) -> tuple[str, list[Step]]:
    """Draws a story and the steps that solve it. Operands have up to two digits, and no number is negative."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    steps: list[Step] = []
    count = rng.randint(2, 99)
    if rng.random() < 1 / 3:
        boxes = rng.randint(2, 9)
        sentences = [f"{name} has {boxes} boxes with {count} {things} in each."]
        steps.append((boxes, "*", count, boxes * count))
        count *= boxes
    else:
        sentences = [f"{name} has {count} {things}."]
    for _ in range(rng.randint(0 if steps else 1, 2 - len(steps))):
        is_more = rng.random() < 0.5 or count < 2
        change = rng.randint(2, 99) if is_more else rng.randint(1, min(99, count - 1))
        sentences.append(rng.choice(MORE if is_more else FEWER).format(name=name, n=change))
        after = count + change if is_more else count - change
        steps.append((count, "+" if is_more else "-", change, after))
        count = after
    return " ".join([*sentences, f"How many {things} are there now?"]), steps


def solution(steps: Sequence[Step]) -> str:
    """The answer that imitation teaches: one equation per step."""
    equations = " ".join(f"{left} {sign} {right} = {result}." for left, sign, right, result in steps)
    return f"{equations} The answer is {steps[-1][3]}."


def load_problems(
    dataset_names: list[str], num_train_problems: int = 4096, num_test_problems: int = 256, seed: int = 0
) -> list[Problem]:
    """Generates problems ``{"dataset", "question", "answer"}``. ``test`` is the same for every seed."""

    def draw(rng: Random, held_out: bool) -> Problem:
        while True:
            question, steps = draw_story(rng)
            if is_held_out(question) == held_out:
                return {"question": question, "answer": steps[-1][3]}

    return generate_problems(
        "arithmetic",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )


required_problem_keys = ("question", "answer")


def task(question: str) -> str:
    return f"{question} {FORM}"


def judge(output: str, answer: int) -> Verdict:
    """Judges the last "answer is N". The calculations earn nothing."""
    found = ANSWER.findall(output)
    if not found:
        return no_answer()
    return correct() if int(found[-1]) == answer else wrong()


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    return await ask_and_judge(
        cfg, llm, problem, session, task=task(problem["question"]), judge=lambda text: judge(text, problem["answer"])
    )


def conversations(rows: int, seed: int) -> list[dict[str, Any]]:
    """Right solutions of stories that are not in ``test``."""
    rng, found = Random(f"imitate {seed}"), []
    while len(found) < rows:
        question, steps = draw_story(rng)
        if not is_held_out(question):
            messages = [
                {"role": "user", "content": task(question)},
                {"role": "assistant", "content": solution(steps)},
            ]
            found.append({"messages": messages})
    return found


if __name__ == "__main__":
    print_conversations(__doc__, conversations)
