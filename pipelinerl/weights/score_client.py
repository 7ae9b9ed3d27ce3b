"""Client for exact scores of given tokens. Imports neither torch nor vLLM: the preprocessor and the trainer use it.

A request carries token ids and gets the log-probability of each id. Nothing is tokenized on the way. Policy servers
score at temperature 1. Reference servers score at the run's sampling temperature (`pipelinerl.inference.args`), so
their scores are comparable with the sampler's.
"""

from collections.abc import Sequence

import aiohttp
import numpy as np

from pipelinerl.errors import ServerError, StreamError, TransportError
from pipelinerl.records.answers import ANSWER_PATH, IMAGE_FORMAT, TEXT_FORMAT, Answer, AnswerRequest
from pipelinerl.streams.codec import Codec

DEFAULT_TIMEOUT_S = 600.0
ERROR_CHARS = 500

_request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
_answer_codec: Codec[Answer] = Codec(Answer)


async def score_sequences(
    session: aiohttp.ClientSession,
    url: str,
    sequences: Sequence[np.ndarray],
    *,
    images: tuple[bytes, ...] = (),
    image_spans: np.ndarray | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[np.ndarray]:
    """Returns the log-probabilities of several sequences' tokens under a server's model, with one request.

    Args:
        session: the caller's pooled connection.
        url: the server, e.g. ``http://127.0.0.1:8000``.
        sequences: int [T] each. With images there is one.
        images: encoded images of that one.
        image_spans: int32 [I, 2], the tokens that stand for each.
        timeout_s: deadline of the whole request.

    Returns:
        float32 [T] of each: entry t is log p(token t | tokens 0 … t−1), entry 0 is 0.

    Raises:
        ServerError: the server answered with a failure status (400: one of these sequences can never be scored).
        TransportError: no answer, or one that is not about these tokens.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    token_ids = np.concatenate(sequences).astype(np.int32, copy=False)
    lengths = [len(sequence) for sequence in sequences]
    try:
        request = _encode_request(token_ids, lengths, images, image_spans)
        async with session.post(url + ANSWER_PATH, data=request, timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                message = body[:ERROR_CHARS].decode(errors="replace")
                raise ServerError(f"{url} answered {response.status}: {message}", response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransportError(f"{url} did not answer: {type(error).__name__} {error}") from error
    try:
        scores = _answer_codec.decode(body).prompt_scores
    except StreamError as error:
        raise TransportError(f"not an answer with scores: {error}") from error
    if scores is None or scores.dtype != np.float32 or scores.shape != token_ids.shape:
        raise TransportError(f"{len(token_ids)} tokens were sent, {0 if scores is None else scores.size} were scored")
    return np.split(scores, np.cumsum(lengths)[:-1])


def _encode_request(
    token_ids: np.ndarray, lengths: list[int], images: tuple[bytes, ...], image_spans: np.ndarray | None
) -> bytes:
    return _request_codec.encode(
        AnswerRequest(
            token_ids=token_ids,
            scores=True,
            prompt_lengths=np.array(lengths, dtype=np.int32),
            images=images,
            image_spans=image_spans,
            format=IMAGE_FORMAT if images else TEXT_FORMAT,
        )
    )
