"""Hidden numbers. With few numbers train and test coincide: what is learned is to search, and there is nothing to hold out."""

from random import Random
from typing import Any

from pipelinerl.errors import DomainError

TEST_EVERY = 4
"""Above ``SMALL`` numbers every fourth one is kept for ``test``."""
SMALL = 64


def is_held_out(number: int, max_number: int) -> bool:
    return max_number > SMALL and number % TEST_EVERY == 0


def load_problems(
    dataset_names: list[str], max_number: int = 1024, num_test_problems: int = 256, seed: int = 0
) -> list[dict[str, Any]]:
    """Problems ``{"dataset", "answer"}``; ``train`` holds every number once, ``test`` is the same for every seed."""
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `guessing` has no dataset {name!r}: use `train` or `test`")
        held_out = [n for n in range(1, max_number + 1) if is_held_out(n, max_number) or max_number <= SMALL]
        trained = [n for n in range(1, max_number + 1) if not is_held_out(n, max_number)]
        if name == "train":
            Random(seed).shuffle(trained)
            numbers = trained
        else:
            numbers = [held_out[index % len(held_out)] for index in range(num_test_problems)]
        problems += [{"dataset": name, "answer": number} for number in numbers]
    return problems
