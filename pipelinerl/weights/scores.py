"""Question and answer of exact scoring: the log-probability of every given token under a server's model. Pure."""

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


def score_request(token_ids: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """The body that asks for the log-probability of every given token."""
    return {
        "token_ids": [int(token) for token in token_ids],
        "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
    }


def read_scores(body: bytes, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 [T] from an answer: entry t is the log-probability of token t after tokens 0 … t−1; entry 0 is 0.

    Raises:
        TransportError: the answer is not about these tokens.
    """
    try:
        rows = msgspec.json.decode(body, type=_Scores).prompt_logprobs
    except msgspec.DecodeError as error:
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
