"""The rules of the game, without a model: messages to the player, parsing of guesses, and rewards."""

import re
from typing import Literal

ANSWER = re.compile(r"<answer>([0-9]{1,18})</answer>")

GameOutcome = Literal["hit", "broken", "missed"]


def instructions(max_number: int) -> str:
    return (
        f"Guess a number between 1 and {max_number}. Answer as <answer>number</answer>."
        " After each guess you hear whether the number is higher or lower."
    )


def feedback(guess: int, relation: str) -> str:
    """Returns the message after a guess. ``relation`` of the hidden number to the guess is "higher" or "lower"."""
    return f"The number is {relation} than {guess}."


def parse_guess(text: str) -> int | None:
    """Returns the first guess in tags, or None."""
    match = ANSWER.search(text)
    return int(match[1]) if match else None


def final_reward(turn: int, outcome: GameOutcome) -> float:
    """Returns 2 − i/10 for a hit at turn i (from 0), −2 + i/10 for a broken format, and 0 if the turns ran out."""
    return {"hit": 2 - turn / 10, "broken": -2 + turn / 10, "missed": 0.0}[outcome]
