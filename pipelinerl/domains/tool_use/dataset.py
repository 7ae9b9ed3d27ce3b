"""Arithmetic too long for the head, from a seed; or questions with numeric answers from files and the Hub."""

import zlib
from random import Random
from typing import Any

from pipelinerl.domains.countdown.expression import evaluate
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.math.dataset import problem_of
from pipelinerl.errors import DomainError

HELD_OUT_EVERY = 10
GENERATED = ("train", "test")


def draw_expression(rng: Random, num_terms: int, max_number: int) -> str:
    """A sum and difference of products."""
    terms = [f"{rng.randint(2, max_number)} * {rng.randint(2, max_number)}" for _ in range(num_terms)]
    text = terms[0]
    for term in terms[1:]:
        text += f" {rng.choice('+-')} {term}"
    return text


def load_problems(
    dataset_names: list[str],
    num_terms: int = 3,
    max_number: int = 9999,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    columns: dict[str, str] | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Problems ``{"dataset", "task", "answer"}``.

    Args:
        dataset_names: ``train`` and ``test`` are generated; any other name is read (``pipelinerl.domains.datasets``).
        num_terms: products in a generated expression.
        max_number: largest number in it.
        columns: of datasets that are read: ``{"task": …, "answer": …}``.
        seed: of ``train``; ``test`` is the same for every seed.
    """
    problems: list[dict[str, Any]] = []
    for name in dataset_names:
        if name in GENERATED:
            count = num_test_problems if name == "test" else num_train_problems
            problems += generate(name, count, num_terms, max_number, seed)
        else:
            problems += [problem_of(row, columns or {}, name, i) for i, row in enumerate(rows_of(name, True))]
    return problems


def generate(name: str, count: int, num_terms: int, max_number: int, seed: int) -> list[dict[str, Any]]:
    if max_number < 2 or num_terms < 1:
        raise DomainError(f"num_terms={num_terms}, max_number={max_number}: use at least 1 and 2")
    held_out = name == "test"
    rng = Random("test" if held_out else f"train {seed}")
    problems: list[dict[str, Any]] = []
    while len(problems) < count:
        expression = draw_expression(rng, num_terms, max_number)
        if (zlib.crc32(expression.encode()) % HELD_OUT_EVERY == 0) == held_out:
            answer = str(evaluate(expression).value)
            problems.append({"dataset": name, "task": f"What is {expression}?", "answer": answer})
    return problems
