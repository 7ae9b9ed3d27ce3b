"""Exact scores of a policy server: the log-probability of every given token, at temperature 1."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from pipelinerl.errors import TransportError

SCORE_PATH = "/inference/v1/generate"


class _Logprob(msgspec.Struct):
    logprob: float


class _Scores(msgspec.Struct):
    """The part of the answer that is read."""

    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Label(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    weight_versions: list[_Label]


class _Labels(msgspec.Struct):
    choices: list[_Choice]


_labels, _scores = msgspec.json.Decoder(_Labels), msgspec.json.Decoder(_Scores)  # made once, as in `probe`


def score_request(token_ids: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Returns the request body for the log-probability of every given token."""
    return {
        "token_ids": [int(token) for token in token_ids],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
    }


def sample_request(first: int, count: int, seed: int) -> dict[str, Any]:
    """Returns the request body for sampling ``count`` tokens after ``first``, from the model's whole distribution."""
    sampling = {"max_tokens": count, "temperature": 1.0, "seed": seed, "ignore_eos": True, "detokenize": False}
    return {"token_ids": [first], "sampling_params": sampling}


def read_version(body: bytes) -> str:
    """Returns the weight label of a scored answer. Empty if the answer names none or several."""
    try:
        labels = {label.version for choice in _labels.decode(body).choices for label in choice.weight_versions}
    except ValueError as error:
        raise TransportError(f"not an answer with weight versions: {error}") from error
    return labels.pop() if len(labels) == 1 else ""


def read_scores(body: bytes, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns float32 [T] from an answer: entry t is log p(token t | tokens 0 … t−1), entry 0 is 0.

    Raises:
        TransportError: the answer is not about these tokens.
    """
    try:
        rows = _scores.decode(body).prompt_logprobs
    except ValueError as error:
        raise TransportError(f"not an answer with prompt log-probabilities: {error}") from error
    if len(rows) != len(token_ids):
        raise TransportError(f"{len(token_ids)} tokens were sent, {len(rows)} were scored")
    values = np.zeros(len(rows), dtype=np.float32)
    for index in range(1, len(rows)):
        row: Mapping[int, _Logprob] = rows[index] or {}
        token = int(token_ids[index])
        if token not in row:
            raise TransportError(f"token {token} at position {index} was not scored")
        values[index] = row[token].logprob
    return values
