"""Recipes of tiny models: their whole tokens and the conversations of their warm-up before training.

A recipe may show the format of an answer and what words mean. It must never show a solved problem of the task, and
never a held-out problem in any form.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.countdown.rollouts import draw_target, is_test_problem
from pipelinerl.domains.countdown.rollouts import question as countdown_question
from pipelinerl.domains.guessing import feedback, instructions
from pipelinerl.domains.laps import ANTICLOCKWISE, CLOCKWISE, WALKERS, is_test_walk, walk
from pipelinerl.domains.laps import question as laps_question
from pipelinerl.domains.largest import is_test_triple, question
from pipelinerl.errors import ConfigError

Messages = list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of a tiny model."""

    layers: int = 2
    heads: int = 2
    """Attention heads of 32, so the model is 32 × heads wide."""
    positions: int = 2048
    """Tokens of the longest sequence."""
    window: int | None = None
    """Tokens that a token attends to, itself included. None = all tokens before it."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A tokenizer's whole tokens and a source of warm-up conversations."""

    tags: tuple[str, ...]
    """Markup that is one token each."""
    max_number: int
    """0 … max_number are one token each."""
    conversation: Callable[[Random], Messages]
    """Draws one conversation. The warm-up teaches its assistant messages."""
    steps: int = 300
    shape: Shape = Shape()
    batch_size: int = 32
    """Conversations per step of the warm-up."""
    cut_tokens: int | None = None
    """Tokens after which the warm-up cuts conversations. None = no cut."""


ANSWER_TAGS = ("<answer>", "</answer>")


def reply(value: object) -> dict[str, str]:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def largest(max_number: int = 30, steps: int = 300) -> Recipe:
    """Answers with a random one of the three numbers shown: right once in three."""

    def conversation(rng: Random) -> Messages:
        while True:
            numbers = rng.sample(range(1, max_number + 1), 3)
            if not is_test_triple(numbers):
                return [user(question(numbers)), reply(rng.choice(numbers))]

    return Recipe(tags=ANSWER_TAGS, max_number=max_number, conversation=conversation, steps=steps)


def guessing(max_number: int = 8, max_turns: int = 3, steps: int = 300) -> Recipe:
    """Answers with any number, or with one higher or lower than another. No conversation has a hidden target."""

    def request(rng: Random) -> Messages:
        relation = rng.choice(("higher", "lower"))
        bound = rng.randint(1, max_number - 1) if relation == "higher" else rng.randint(2, max_number)
        choices = range(bound + 1, max_number + 1) if relation == "higher" else range(1, bound)
        return [user(feedback(bound, relation)), reply(rng.choice(choices))]

    def conversation(rng: Random) -> Messages:
        first = [user(instructions(max_number)), reply(rng.randint(1, max_number))]
        return first + [message for _ in range(rng.randint(0, max_turns - 1)) for message in request(rng)]

    return Recipe(tags=ANSWER_TAGS, max_number=max_number, conversation=conversation, steps=steps)


def countdown(max_number: int = 20, operators: str = "+-", steps: int = 300) -> Recipe:
    """Combines the two numbers shown with a random operator in a random order. The target has no influence."""

    def problem(rng: Random) -> tuple[list[int], int]:
        while True:
            numbers = [rng.randint(1, max_number) for _ in range(2)]
            target = draw_target(rng, numbers, operators)
            if target is not None and target not in numbers and not is_test_problem(numbers, target):
                return numbers, target

    def conversation(rng: Random) -> Messages:
        numbers, target = problem(rng)
        left, right = rng.sample(numbers, 2)
        return [user(countdown_question(numbers, target, True)), reply(f"{left}{rng.choice(operators)}{right}")]

    largest_target = max_number**2 if "*" in operators else 2 * max_number
    return Recipe(tags=ANSWER_TAGS, max_number=largest_target, conversation=conversation, steps=steps)


def laps(
    num_stations: int = 44,
    max_laps: int = 50,
    layers: int = 2,
    heads: int = 2,
    positions: int = 4096,
    steps: int = 600,
) -> Recipe:
    """Walks the wanted laps without a mistake, in a random direction: right once in two."""

    def conversation(rng: Random) -> Messages:
        while True:
            number, walker = rng.randint(1, rng.choice((2, max_laps, max_laps))), rng.choice(WALKERS)
            if not is_test_walk(number, walker):
                walked = walk(num_stations, number, rng.choice((CLOCKWISE, ANTICLOCKWISE)))
                return [user(laps_question(number, walker)), {"role": "assistant", "content": walked}]

    return Recipe(
        tags=(*WALKERS, *(f" {number}" for number in range(max(num_stations, max_laps + 1)))),
        max_number=0,
        conversation=conversation,
        steps=steps,
        # The window reaches back to the previous line, so the warm-up on the first laps holds for any number of laps.
        shape=Shape(layers=layers, heads=heads, positions=positions, window=num_stations + 12),
        batch_size=16,
        cut_tokens=3 * num_stations,
    )


RECIPES: dict[str, Callable[..., Recipe]] = {
    "largest": largest,
    "guessing": guessing,
    "countdown": countdown,
    "laps": laps,
}


def make_recipe(name: str, params: dict[str, object]) -> Recipe:
    """Makes the recipe ``name``, a key of `RECIPES` or the dotted name of a function. Raises ``ConfigError``."""
    if name not in RECIPES and "." not in name:
        raise ConfigError(
            f"`tiny_model.recipe` is {name!r}: choose one of {sorted(RECIPES)}, or name a function of yours as "
            "module.function"
        )
    make = RECIPES.get(name) or resolve_function(name)
    known = inspect.signature(make).parameters
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise ConfigError(f"`tiny_model.params` has {unknown}, recipe {name!r} takes {sorted(known)}: remove them")
    return make(**params)
