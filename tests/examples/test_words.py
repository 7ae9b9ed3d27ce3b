"""The recipe `words`: what counts as a sentence, what it earns, and the correlation from the metrics' means."""

import math

import numpy as np
import pytest

from examples.words.words import LENGTHS, WordsMetrics, correlation, count_words, load_problems, measure, reward
from pipelinerl.errors import DomainError


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Rain falls on the old roof.", 6),
        ("  Don't wait, winter's well-known snow is here!\n", 7),
        ("Rain falls. It is wet.", None),  # two sentences
        ("Rain falls on the roof", None),  # no end
        ("rain falls on the roof.", None),  # no capital
        ("Rain: it falls.", None),
        ("Rain fell\non us.", None),
        ("It fell for 7 days.", None),
        ('"Rain falls."', None),
        ("A sentence about rain.", None),  # copies the task
        ("Rain rain rain falls.", None),  # 2 of 4 words are different
        ("The rain and the wind met the sea.", 8),  # 6 of 8 are different, which is just enough
        ("The rain and the wind met rain.", None),  # 5 of 7
        ("", None),
    ],
)
def test_count_words_takes_one_sentence_only(answer: str, expected: int | None) -> None:
    assert count_words(answer) == expected


def test_reward_pays_half_for_the_distance_and_half_for_the_length() -> None:
    assert reward(8, 8) == 1.0
    assert reward(8, 6) == pytest.approx(0.5 * (1 - 2 / 8))
    assert reward(4, 12) == 0.0
    assert reward(8, None) == 0.0


def test_best_single_length_earns_what_the_page_says() -> None:
    """By hand for 7 words: 1/9 exact; ½ · mean of 1 − |7 − n| / n over n = 4 … 12 is .3473, and 1/18 more."""
    earned = {k: np.mean([reward(n, k) for n in LENGTHS]) for k in LENGTHS}
    best = max(earned, key=earned.get)
    assert (best, round(earned[best], 3)) == (7, 0.403)


def test_no_topic_is_in_both_parts() -> None:
    train, test = load_problems(["train"]), load_problems(["test"])
    assert (len(train), len(test)) == (48 * 9, 12 * 9)
    assert not {problem["topic"] for problem in train} & {problem["topic"] for problem in test}
    with pytest.raises(DomainError, match="no dataset 'dev'"):
        load_problems(["dev"])


def test_correlation_from_means_equals_numpy_over_the_sentences() -> None:
    random = np.random.default_rng(0)
    asked = random.integers(4, 13, 200)
    written = [int(n + random.integers(-2, 3)) if random.random() > 0.3 else None for n in asked]
    found = [measure(int(a), w) for a, w in zip(asked, written, strict=True)]
    means = {name: float(np.mean([getattr(m, name) for m in found])) for name in WordsMetrics.model_fields}
    pairs = [(a, w) for a, w in zip(asked, written, strict=True) if w is not None]
    assert correlation(means) == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1], abs=1e-12)


def test_correlation_of_one_length_is_undefined() -> None:
    found = [measure(n, 7) for n in LENGTHS]
    means = {name: float(np.mean([getattr(m, name) for m in found])) for name in WordsMetrics.model_fields}
    assert math.isnan(correlation(means))
