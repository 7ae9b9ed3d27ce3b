"""For domains written for PipelineRL: judges countdown answers in ``\\boxed{}``."""

from collections import Counter
from collections.abc import Sequence

from pipelinerl.domains.countdown.judge import ExpressionError, evaluate
from pipelinerl.domains.math.judge import last_boxed


def extract_solution(solution_str: str) -> str | None:
    r"""Returns the content of the last ``\boxed{}`` in the last line. None if it is missing or empty."""
    return last_boxed(solution_str.rpartition("\n")[2]) or None


def validate_format(solution_str: str) -> bool:
    """Whether the output contains ``<think>…</think>`` with text in it."""
    thought, is_closed, _ = solution_str.partition("<think>")[2].partition("</think>")
    return bool(is_closed and thought.strip())


def validate_equation(equation_str: str, available_numbers: Sequence[int]) -> bool:
    """Whether the expression ``equation_str`` uses each of ``available_numbers`` exactly once."""
    try:
        return Counter(evaluate(equation_str).numbers) == Counter(available_numbers)
    except ExpressionError:
        return False


def evaluate_equation(equation_str: str) -> float | None:
    """Returns the value of an expression, without executing code. None if it is not valid or divides by zero."""
    try:
        return float(evaluate(equation_str).value)
    except ExpressionError:
        return None
