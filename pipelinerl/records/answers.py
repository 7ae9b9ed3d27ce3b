"""Requests to an inference server and its answers: prompts as token ids, completions as packed arrays.

A missing field takes its default and unknown fields are ignored, so ``format`` changes only if an old reader would
misread the record. Shapes: P prompt tokens, C completion tokens, J most likely tokens, R spans.
"""

from typing import Any

import msgspec
import numpy as np

ANSWER_PATH = "/answers"
UNDER_WAY_PATH = "/answers/under_way"
"""Answers a GET with ``UnderWay`` in JSON. Parameter ``prefix`` chooses requests by the beginning of their names."""
REQUEST_NAME = "X-Request-Id"
"""Header of a request for an answer: the name under which ``UnderWay`` has it."""
ANSWER_FORMAT = 2
"""The newest format that this version reads."""
TEXT_FORMAT, IMAGE_FORMAT = 1, 2
"""A reader of format 1 would answer a prompt without its images."""


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Samples completions of one prompt, or scores the prompt itself."""

    token_ids: np.ndarray
    """int32 [P], P ≥ 1."""
    model: str = ""
    """Name of the model that must answer. Empty = whichever model the server has."""
    sampling: dict[str, Any] = {}
    """vLLM's sampling parameters. ``n`` is the number of completions. ``logprobs: 0`` asks for the log-probabilities of
    the sampled tokens."""
    scores: bool = False
    """Asks for the log-probability of every prompt token, without sampling."""
    top_scores: int = 0
    """J, with ``scores`` only: asks for the most likely tokens of every position, too."""
    prompt_lengths: np.ndarray | None = None
    """int32, with ``scores`` only: ``token_ids`` holds several prompts of these lengths, which are scored separately.
    None = one prompt."""
    prefix_version: int | None = None
    """Weight version of the first token of the conversation that the prompt continues. A server that keeps the prefix
    cache of conversations looks up their keys and values under this version."""
    images: tuple[bytes, ...] = ()
    """Encoded images of the prompt (format 2)."""
    image_spans: np.ndarray | None = None
    """int32 [I, 2]: (start, end exclusive) of the tokens that stand for each image: one placeholder, or those that an
    earlier answer had in its place. None without images."""
    format: int = TEXT_FORMAT


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled completion."""

    token_ids: np.ndarray
    """int32 [C]"""
    logprobs: np.ndarray | None = None
    """float32 [C], natural log, of the sampled tokens. None = not requested."""
    version_spans: np.ndarray | None = None
    """int32 [R, 3]: (start, end exclusive, weight version). None = the weights come from no optimizer step."""
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [P + C − 1, layers × experts per token]. None = not requested."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of an answer with status 200. With any other status the body is a JSON object with ``error.message``."""

    completions: tuple[Completion, ...] = ()
    """Ordered by completion index."""
    prompt_scores: np.ndarray | None = None
    """float32 [P]: entry t is log p(token t | tokens 0 … t−1) of its prompt. The first entry of a prompt is 0.
    None = not requested."""
    scored_by: int | None = None
    """Weight version that scored, of several prompts the oldest. None = the weights come from no optimizer step, or no
    scores were requested."""
    top_ids: np.ndarray | None = None
    """int32 [P, J]: entry t are the most likely tokens in the place of token t, best first. The first entry of a prompt
    is 0. None = not requested."""
    top_scores: np.ndarray | None = None
    """float32 [P, J]: their log-probabilities."""
    prompt_ids: np.ndarray | None = None
    """int32 [P]: a prompt with images as the model read it, each placeholder replaced. None = as sent."""
    image_spans: np.ndarray | None = None
    """int32 [I, 2]: (start, end exclusive) of each image in ``prompt_ids``. None without images."""
    format: int = TEXT_FORMAT


class RequestUnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """A request that a server has not answered."""

    tokens: tuple[int, ...]
    """Tokens sampled of each of its completions that has not ended."""
    waits: bool
    """Whether a completion waits for its turn: it has not started, or has lost its place."""


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """What a server samples."""

    sampled: int
    """Tokens that it has sampled since it began, for anybody."""
    requests: dict[str, RequestUnderWay]
    """By the name that the client gave. Requests without a name are left out."""
