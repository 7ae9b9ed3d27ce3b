"""Exact scores: the log-probability of every given token under a server's model. Imports neither torch nor vLLM.

Policy servers score at temperature 1, reference servers at the run's sampling temperature.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from pipelinerl.errors import ServerError, StreamError, TransportError
from pipelinerl.records.answers import ANSWER_PATH, IMAGE_FORMAT, TEXT_FORMAT, Answer, AnswerRequest
from pipelinerl.streams.codec import Codec

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


_labels, _scores = msgspec.json.Decoder(_Labels), msgspec.json.Decoder(_Scores)  # made once, as in `probe_client`


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
    except msgspec.DecodeError as error:
        raise TransportError(f"not an answer with weight versions: {error}") from error
    return labels.pop() if len(labels) == 1 else ""


def read_scores(body: bytes, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns float32 [T] from an answer: entry t is log p(token t | tokens 0 … t−1), entry 0 is 0.

    Raises:
        TransportError: the answer is not about these tokens.
    """
    try:
        rows = _scores.decode(body).prompt_logprobs
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


DEFAULT_TIMEOUT_S = 600.0
ERROR_CHARS = 500

_request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
_answer_codec: Codec[Answer] = Codec(Answer)


class Scores(NamedTuple):
    """Of one sequence of T tokens. Entry t is about the token in place t after tokens 0 … t − 1, entry 0 is 0."""

    logprobs_T: np.ndarray
    """float32: of the sequence's own token."""
    top_ids_TJ: np.ndarray | None = None
    """int32: the J most likely tokens, best first. None: not asked for."""
    top_logprobs_TJ: np.ndarray | None = None
    """float32: their log-probabilities."""
    version: int | None = None
    """As `Answer.scored_by`."""


async def score_sequences(
    session: aiohttp.ClientSession,
    url: str,
    sequences: Sequence[np.ndarray],
    *,
    images: tuple[bytes, ...] = (),
    image_spans: np.ndarray | None = None,
    num_top: int = 0,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Scores]:
    """Returns the log-probabilities of several sequences' tokens under a server's model, with one request.

    Args:
        url: the server, e.g. ``http://127.0.0.1:8000``.
        sequences: int [T] each. With images there is one.
        images: encoded images of that one.
        image_spans: int32 [I, 2], the tokens that stand for each.
        num_top: J, most likely tokens of each place.

    Raises:
        ServerError: the server answered with a failure status (400: one of these sequences can never be scored).
        TransportError: no answer, or one that is not about these tokens.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    token_ids = np.concatenate(sequences).astype(np.int32, copy=False)
    lengths = [len(sequence) for sequence in sequences]
    try:
        request = _encode_request(token_ids, lengths, images, image_spans, num_top)
        async with session.post(url + ANSWER_PATH, data=request, timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                message = body[:ERROR_CHARS].decode(errors="replace")
                raise ServerError(f"{url} answered {response.status}: {message}", response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransportError(f"{url} did not answer: {type(error).__name__} {error}") from error
    try:
        answer = _answer_codec.decode(body)
    except StreamError as error:
        raise TransportError(f"not an answer with scores: {error}") from error
    ends = np.cumsum(lengths)[:-1]
    columns = [_split(answer.prompt_scores, np.float32, token_ids.shape, ends)]
    if num_top:
        shape = (len(token_ids), num_top)
        columns += [_split(answer.top_ids, np.int32, shape, ends), _split(answer.top_scores, np.float32, shape, ends)]
    return [Scores(*values)._replace(version=answer.scored_by) for values in zip(*columns, strict=True)]


def _split(
    values: np.ndarray | None, dtype: type[np.generic], shape: tuple[int, ...], ends: np.ndarray
) -> list[np.ndarray]:
    if values is None or values.dtype != dtype or values.shape != shape:
        found = "nothing" if values is None else f"{values.dtype} {values.shape}"
        raise TransportError(f"{shape[0]} tokens were sent, and {found} were scored, not {shape}")
    return np.split(values, ends)


def _encode_request(
    token_ids: np.ndarray,
    lengths: list[int],
    images: tuple[bytes, ...],
    image_spans: np.ndarray | None,
    num_top: int,
) -> bytes:
    return _request_codec.encode(
        AnswerRequest(
            token_ids=token_ids,
            scores=True,
            top_scores=num_top,
            prompt_lengths=np.array(lengths, dtype=np.int32),
            images=images,
            image_spans=image_spans,
            format=IMAGE_FORMAT if images else TEXT_FORMAT,
        )
    )
