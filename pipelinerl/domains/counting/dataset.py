"""Invents words from a seed. A word's spelling decides its part, so train and test share none."""

from random import Random

from pipelinerl.domains.datasets import Problem, generate_problems, is_held_out

ONSETS = ("b", "bl", "c", "cr", "d", "f", "g", "gr", "h", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
VOWELS = ("a", "e", "i", "o", "u", "ea", "oo", "ie")
CODAS = ("", "", "l", "ll", "n", "r", "rr", "s", "ss", "t", "tt")


def draw_word(rng: Random, max_syllables: int) -> str:
    count = rng.randint(2, max_syllables)
    return "".join(rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(count))


def load_problems(
    dataset_names: list[str],
    max_syllables: int = 5,
    num_train_problems: int = 4096,
    num_test_problems: int = 256,
    seed: int = 0,
) -> list[Problem]:
    """Generates problems ``{"dataset", "word", "letter", "count"}``. Four in five letters are drawn from the word.

    Args:
        dataset_names: any of ``train`` and ``test``.
        max_syllables: words have 2 … max_syllables.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
    """

    def draw(rng: Random, held_out: bool) -> Problem:
        while is_held_out(word := draw_word(rng, max_syllables)) != held_out:
            pass
        letter = rng.choice(word) if rng.random() < 0.8 else rng.choice("abcdefghijklmnopqrstuvwxyz")
        return {"word": word, "letter": letter, "count": word.count(letter)}

    return generate_problems(
        "counting",
        dataset_names,
        draw,
        num_train_problems=num_train_problems,
        num_test_problems=num_test_problems,
        seed=seed,
    )
