"""Triples of distinct numbers. Those whose sum is divisible by 5 are held out: only ``test`` ever shows them."""

from itertools import permutations
from random import Random
from typing import Any

from pipelinerl.errors import DomainError

HELD_OUT_DIVISOR = 5


def question(numbers: list[int]) -> str:
    first, second, third = numbers
    return f"Which is the largest of {first}, {second} and {third}?"


def is_held_out(numbers: list[int]) -> bool:
    """Held-out triples are never trained on, whatever their order."""
    return sum(numbers) % HELD_OUT_DIVISOR == 0


def load_problems(
    dataset_names: list[str], max_number: int = 30, num_test_problems: int = 512, seed: int = 0
) -> list[dict[str, Any]]:
    """Problems ``{"dataset", "question", "answer"}`` of the named parts.

    Args:
        dataset_names: any of ``train`` and ``test``.
        max_number: numbers are drawn from 1 … max_number.
        num_test_problems: size of ``test``, drawn once and for all: the same for every ``seed``.
        seed: order of ``train``, which holds every triple that is not held out.
    """
    triples = [list(numbers) for numbers in permutations(range(1, max_number + 1), 3)]
    problems = []
    for name in dataset_names:
        if name == "train":
            chosen = [numbers for numbers in triples if not is_held_out(numbers)]
            Random(seed).shuffle(chosen)
        elif name == "test":
            held_out = [numbers for numbers in triples if is_held_out(numbers)]
            chosen = Random("held-out").sample(held_out, min(num_test_problems, len(held_out)))
        else:
            raise DomainError(f"domain `largest` has no dataset {name!r}: use `train` or `test`")
        problems += [{"dataset": name, "question": question(n), "answer": max(n)} for n in chosen]
    return problems
