"""The game's words and rules, without a model: what is said, how a guess is read, what it is worth."""

import re
from dataclasses import dataclass

ANSWER = re.compile(r"<answer>([0-9]+)</answer>")


@dataclass(frozen=True, kw_only=True)
class GameSettings:
    """``environment`` of the configuration; the defaults are the README's game."""

    max_number: int = 1024
    max_turns: int = 13


def instructions(max_number: int) -> str:
    return (
        f"Guess a number between 1 and {max_number}. Answer as <answer>number</answer>."
        " After each guess you hear whether the number is higher or lower."
    )


def feedback(guess: int, relation: str) -> str:
    """What the player hears; ``relation`` of the hidden number to the guess: "higher" or "lower"."""
    return f"The number is {relation} than {guess}."


def parse_guess(text: str) -> int | None:
    """The guess in its tags; None when there is none (huge digit strings are none: they are no number of the game)."""
    match = ANSWER.search(text)
    return int(match[1]) if match and len(match[1]) <= 18 else None


def final_reward(turn: int, outcome: str) -> float:
    """2 − i/10 for a hit at turn i (from 0), −2 + i/10 for a broken format at turn i, 0 when the turns ran out."""
    return {"hit": 2 - turn / 10, "broken": -2 + turn / 10, "missed": 0.0}[outcome]
