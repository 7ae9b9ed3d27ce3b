"""A tiny model for two CPU cores. It answers with any of the twelve commands that mend a repository."""

from random import Random

from examples.workspace.domain import TASKS, load_problems
from pipelinerl.tiny_model.recipes import Messages, Recipe, user


def any_command(steps: int = 300) -> Recipe:
    """Each command is one token, so a right answer has one chance in twelve."""
    questions = [problem["question"] for problem in load_problems(["train"])]
    commands = tuple(f"$ {task['fix']}" for task in TASKS.values())

    def conversation(rng: Random) -> Messages:
        return [user(rng.choice(questions)), {"role": "assistant", "content": rng.choice(commands)}]

    return Recipe(tags=commands, max_number=9, conversation=conversation, steps=steps)
