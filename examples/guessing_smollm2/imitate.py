"""Conversations of legal, not clever, play of the guessing game, for imitation before reinforcement learning.

    python -m examples.guessing_smollm2.imitate --rows 600 > results/guessing_rows.jsonl

Every guess is drawn from the numbers that the answers so far leave, which finds 1 … 128 in eight turns in .59 of games.
The rows teach what an answer looks like, and that it lies within the bounds. Searching well is left to the rewards.
"""

from random import Random
from typing import Any

from examples.imitation import print_conversations
from pipelinerl.domains.guessing import feedback, instructions, numbers_of


def play(rng: Random, number: int, max_number: int, max_turns: int) -> list[dict[str, str]]:
    """One game as the messages of a conversation. It ends with the last guess."""
    low, high = 1, max_number
    messages = [{"role": "user", "content": instructions(max_number)}]
    for turn in range(1, max_turns + 1):
        guess = rng.randint(low, high)
        messages.append({"role": "assistant", "content": f"<answer>{guess}</answer>"})
        if guess == number or turn == max_turns:
            break
        is_higher = number > guess
        low, high = (guess + 1, high) if is_higher else (low, guess - 1)
        messages.append({"role": "user", "content": feedback(guess, "higher" if is_higher else "lower")})
    return messages


def conversations(rows: int, seed: int, max_number: int = 128, max_turns: int = 8) -> list[dict[str, Any]]:
    """``{"messages"}`` per game, of numbers that are not held out."""
    rng, numbers = Random(f"imitate {seed}"), numbers_of("train", max_number)
    return [{"messages": play(rng, rng.choice(numbers), max_number, max_turns)} for _ in range(rows)]


if __name__ == "__main__":
    print_conversations(__doc__, conversations)
