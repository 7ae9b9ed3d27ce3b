"""Triples of distinct numbers. Triples whose sum is divisible by 5 are held out and appear only in ``test``."""

from collections.abc import Sequence
from itertools import permutations
from random import Random
from typing import Any

from pipelinerl.errors import DomainError

HELD_OUT_DIVISOR = 5


def question(numbers: Sequence[int]) -> str:
    first, second, third = numbers
    return f"Which is the largest of {first}, {second} and {third}?"


def is_test_triple(numbers: Sequence[int]) -> bool:
    """Whether a triple is held out from training. The order of its numbers does not matter."""
    return sum(numbers) % HELD_OUT_DIVISOR == 0


def load_problems(dataset_names: list[str], max_number: int = 30, num_test_problems: int = 512) -> list[dict[str, Any]]:
    """Makes the problems ``{"dataset", "question", "answer"}`` of the named parts.

    Args:
        dataset_names: any of ``train`` (every ordered triple that is not held out) and ``test``.
        max_number: numbers are drawn from 1 … max_number.
        num_test_problems: size of ``test``, a fixed sample of the held-out triples.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `largest` has no dataset {name!r}: use `train` or `test`")
        held_out = name == "test"
        triples = [list(n) for n in permutations(range(1, max_number + 1), 3) if is_test_triple(n) == held_out]
        if held_out:
            triples = Random(0).sample(triples, min(num_test_problems, len(triples)))
        problems += [{"dataset": name, "question": question(n), "answer": max(n)} for n in triples]
    return problems
