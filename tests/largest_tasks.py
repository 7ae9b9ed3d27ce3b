"""The quickstart's problems for other rollouts: with a task to judge, and with a hint that a teacher sees."""

from typing import Any

from pipelinerl.domains import largest


def load_judged(dataset_names: list[str], **params: Any) -> list[dict[str, Any]]:
    """``{"dataset", "task", "answer"}`` for the domain `judged`."""
    return [
        {"dataset": problem["dataset"], "task": problem["question"], "answer": str(problem["answer"])}
        for problem in largest.load_problems(dataset_names, **params)
    ]


def load_hinted(dataset_names: list[str], **params: Any) -> list[dict[str, Any]]:
    return [
        problem | {"hint": f"It is {problem['answer']}."} for problem in largest.load_problems(dataset_names, **params)
    ]


def load_shown(dataset_names: list[str], **params: Any) -> list[dict[str, Any]]:
    """With a hint that the quickstart's model understands, which answers with a random one of the numbers it sees."""
    return [
        problem | {"hint": largest.question([problem["answer"]] * 3)}
        for problem in largest.load_problems(dataset_names, **params)
    ]
