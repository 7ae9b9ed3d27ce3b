"""Exact scores of given tokens by a server. Imports neither torch nor vLLM: the preprocessor and the trainer use it.

A request carries token ids and gets the log-probability of each id that was sent, nothing is tokenized on the way.
On policy servers the values are those of temperature 1; reference servers are started with the run's sampling
temperature (`pipelinerl.inference.args`), so theirs compare with the sampler's.
"""

from collections.abc import Sequence

import aiohttp
import numpy as np

from pipelinerl.errors import ServerError, TransportError
from pipelinerl.weights.scores import SCORE_PATH, read_scores, score_request

DEFAULT_TIMEOUT_S = 600.0
ERROR_CHARS = 500


async def score_tokens(
    session: aiohttp.ClientSession,
    url: str,
    token_ids: Sequence[int] | np.ndarray,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> np.ndarray:
    """Log-probabilities of a sequence's tokens under a server's model.

    Args:
        session: the caller's pooled connection.
        url: the server, e.g. ``http://127.0.0.1:8000``.
        token_ids: int [T].
        timeout_s: deadline of the whole request.

    Returns:
        float32 [T]: entry t is log p(token t | tokens 0 … t−1); entry 0 is 0.

    Raises:
        ServerError: the server answered with a failure status (400: these tokens can never be scored).
        TransportError: no answer, or one that is not about these tokens.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.post(url + SCORE_PATH, json=score_request(token_ids), timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                message = body[:ERROR_CHARS].decode(errors="replace")
                raise ServerError(f"{url} answered {response.status}: {message}", response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransportError(f"{url} did not answer: {type(error).__name__} {error}") from error
    return read_scores(body, token_ids)
