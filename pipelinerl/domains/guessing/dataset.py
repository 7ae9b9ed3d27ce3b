"""The hidden numbers of the game.

Up to ``SMALL`` numbers, train and test are the same, because the skill to learn is the search and not the numbers.
"""

from typing import Any

from pipelinerl.errors import DomainError

SMALL = 64
HELD_OUT_EVERY = 4
"""With more than ``SMALL`` numbers, every fourth one is held out for ``test``."""


def numbers_of(part: str, max_number: int) -> list[int]:
    """Returns the numbers of ``train`` or ``test``, ascending."""
    numbers = range(1, max_number + 1)
    if max_number <= SMALL:
        return list(numbers)
    return [number for number in numbers if (number % HELD_OUT_EVERY == 0) == (part == "test")]


def load_problems(
    dataset_names: list[str], max_number: int = 1024, max_turns: int = 13, num_test_problems: int = 256
) -> list[dict[str, Any]]:
    """Makes the problems ``{"dataset", "answer", "max_number", "max_turns"}`` of the named parts.

    Args:
        dataset_names: any of ``train`` (each of its numbers once) and ``test`` (cycles through its numbers).
        max_number: the hidden number is one of 1 … max_number.
        max_turns: maximum number of guesses in a game.
        num_test_problems: size of ``test``.
    """
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `guessing` has no dataset {name!r}: use `train` or `test`")
        numbers = numbers_of(name, max_number)
        if name == "test":
            numbers = [numbers[index % len(numbers)] for index in range(num_test_problems)]
        problems += [{"dataset": name, "answer": n, "max_number": max_number, "max_turns": max_turns} for n in numbers]
    return problems
