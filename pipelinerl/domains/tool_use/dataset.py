"""Long arithmetic generated from a seed, or questions with numeric answers from files and the Hub."""

from random import Random

from pipelinerl.domains.countdown.expression import evaluate
from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out
from pipelinerl.domains.math.dataset import problem_of
from pipelinerl.errors import DomainError


def draw_expression(rng: Random, num_terms: int, max_number: int) -> str:
    """Draws a chain of sums and differences of products."""
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
) -> list[Problem]:
    """Loads problems ``{"dataset", "task", "answer"}``.

    Args:
        dataset_names: ``train`` and ``test`` are generated. Other names are read (``pipelinerl.domains.datasets``).
        num_terms: products in a generated expression.
        max_number: largest number in it.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        columns: field → column of data sets that are read: ``{"task": …, "answer": …}``.
        seed: of ``train``. ``test`` is the same for every seed.
    """
    if max_number < 2 or num_terms < 1:
        raise DomainError(f"num_terms={num_terms}, max_number={max_number}: use at least 1 and 2")

    def draw(rng: Random, held_out: bool) -> Problem:
        while is_held_out(expression := draw_expression(rng, num_terms, max_number)) != held_out:
            pass
        return {"task": f"What is {expression}?", "answer": str(evaluate(expression).value)}

    return generate_problems(
        "tool_use",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
        read=lambda row, name, index: problem_of(row, columns or {}, name, index),
    )
