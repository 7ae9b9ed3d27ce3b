"""One sentence with exactly n words about a topic: a task for small pretrained models, judged by counting.

Reward: ½ · max(0, 1 − |k − n| / n) + ½ · [k = n] for a sentence of k words, and 0 for everything else. The moments of
asked and written lengths are metrics, from which `correlation` follows.
"""

import math
import re
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

TOPICS = (
    "rain", "bread", "a horse", "the sea", "a garden", "snow", "a bridge", "the moon", "tea", "a market",
    "wind", "a teacher", "a train", "music", "the desert", "a cat", "winter", "a library", "fire", "a doctor",
    "coffee", "a mountain", "a farmer", "the city", "a river", "school", "a boat", "the sun", "cheese", "a storm",
    "a king", "football", "an apple", "a forest", "sleep", "a clock", "the kitchen", "a bird", "paper", "a village",
    "salt", "a dream", "the road", "a letter", "gold", "a dog", "summer", "a museum", "milk", "a window",
    "a painter", "ice", "a lamp", "the night", "a bicycle", "honey", "a tree", "the radio", "a baker", "time",
)  # fmt: skip
HELD_OUT_EVERY = 5
LENGTHS = range(4, 13)
WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")
SENTENCE = re.compile(r"\s*[A-Z][^.!?\n:;\"()\d]*[.!?]\s*")
"""One sentence in one line, with nothing around it. Digits would be counted by some and not by others."""
COPIED = frozenset({"sentence", "sentences", "word", "words", "exactly"})
MIN_DISTINCT = 0.75
"""Share of different words. English sentences of 12 words repeat two or three of them: articles and prepositions."""


def load_problems(dataset_names: list[str]) -> list[dict[str, Any]]:
    """Makes a problem ``{"dataset", "topic", "length"}`` for every topic and length. Every fifth topic is in `test`."""
    problems = []
    for name in dataset_names:
        if name not in ("train", "test"):
            raise DomainError(f"domain `words` has no dataset {name!r}: use `train` or `test`")
        topics = [t for index, t in enumerate(TOPICS) if (index % HELD_OUT_EVERY == 0) == (name == "test")]
        problems += [{"dataset": name, "topic": topic, "length": length} for topic in topics for length in LENGTHS]
    return problems


required_problem_keys = ("topic", "length")


def question(topic: str, length: int) -> str:
    return f"Write one sentence about {topic} with exactly {length} words."


def count_words(answer: str) -> int | None:
    """Counts the words of an answer that is one sentence. None: it is none, repeats itself, or copies the task."""
    if not SENTENCE.fullmatch(answer):
        return None
    words = [word.lower() for word in WORD.findall(answer)]
    if COPIED.intersection(words) or len(set(words)) < MIN_DISTINCT * len(words):
        return None
    return len(words)


def reward(asked: int, written: int | None) -> float:
    """Half for the distance, half for the exact length. 0 for what is not one sentence."""
    if written is None:
        return 0.0
    return 0.5 * max(0.0, 1 - abs(written - asked) / asked) + 0.5 * (written == asked)


class WordsMetrics(BaseMetrics):
    """``written`` and the products are 0 where the answer is not one sentence, as ``no_answer`` says."""

    asked: float
    written: float
    asked_squared: float
    written_squared: float
    asked_written: float


def measure(asked: int, written: int | None) -> WordsMetrics:
    """The metrics of one answer. ``asked`` counts answers that are one sentence, as the other moments do."""
    counted = written or 0
    asked_counted = asked if written is not None else 0
    return WordsMetrics(
        reward=reward(asked, written),
        success=written == asked,
        no_error=written is not None,
        no_answer=written is None,
        asked=asked_counted,
        written=counted,
        asked_squared=asked_counted**2,
        written_squared=counted**2,
        asked_written=asked_counted * counted,
    )


def correlation(means: Mapping[str, float]) -> float:
    """Pearson's correlation of asked and written length over the answers that are one sentence.

    Args:
        means: of the fields of `WordsMetrics` over all answers.
    Returns:
        A number from −1 to 1. NaN if fewer than two lengths were asked or written.
    """
    share = 1 - means["no_answer"]
    if share <= 0:
        return math.nan
    asked, written = means["asked"] / share, means["written"] / share
    covariance = means["asked_written"] / share - asked * written
    variances = (means["asked_squared"] / share - asked**2) * (means["written_squared"] / share - written**2)
    return covariance / math.sqrt(variances) if variances > 1e-12 else math.nan


def figures(means: Mapping[str, float]) -> dict[str, float | None]:
    """What `benchmarks.recipe` adds to an evaluation."""
    found = correlation(means)
    return {"correlation": None if math.isnan(found) else found}


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    prompt = Prompt.from_user_message(question(problem["topic"], problem["length"]))
    llm_call = await llm_async_generate(llm, prompt, session)
    text = make_training_text(llm, llm_call)
    written = count_words(llm_call.output.content or "") if text.finished else None
    metrics = measure(problem["length"], written)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem["dataset"],
    )
