"""Classifies the failures of rollouts. Each cause has one word, its own counter and its own budget. Pure."""

import asyncio
import traceback

import aiohttp

from pipelinerl.actor.sequences import SequenceTooLong
from pipelinerl.async_llm import is_retryable
from pipelinerl.errors import (
    DomainError,
    PipelineRLError,
    RecordError,
    ServerError,
    TransportError,
    VerifierError,
)
from pipelinerl.observability.logging import redacted

TRANSPORT, WEIGHTS, TIMEOUT, VERIFIER, DOMAIN, TOO_LONG, TOO_LARGE, EMPTY, POISONOUS = (
    "transport",
    "weights",
    "timeout",
    "verifier",
    "domain_error",
    "too_long",
    "too_large",
    "empty",
    "poisonous",
)
REASONS = (TRANSPORT, WEIGHTS, TIMEOUT, VERIFIER, DOMAIN, TOO_LONG, TOO_LARGE, EMPTY, POISONOUS)
WORTH_REPEATING = frozenset({TRANSPORT, WEIGHTS, TIMEOUT, VERIFIER, POISONOUS})
"""Causes outside the problem itself. Attempts that fail for one of these are tried again."""
OF_THE_DOMAIN = frozenset({DOMAIN, EMPTY})
"""Causes in the domain's own code. It will do so again, so they count towards ``actor.max_domain_errors``."""
KEEP_ANSWERS = frozenset({TRANSPORT, VERIFIER})
"""Causes that mostly lie outside the attempt, too. Tried again for the first time, it gets the answers that it had got.
After a second failure, or another one, they are sampled anew: they may be a faulty server's, or the reason why it
failed, such as an answer of which a judge can say nothing."""

MAX_ERROR_CHARS = 2000

_TOO_LONG_WORDS = ("maximum model length", "maximum context length", "max_model_len", "longer than the maximum")


def classify(error: BaseException) -> str:
    """Returns the reason, one of ``REASONS``, for an exception that ended a rollout."""
    if isinstance(error, VerifierError):
        return VERIFIER
    if isinstance(error, SequenceTooLong):
        return TOO_LONG
    if isinstance(error, (DomainError, RecordError)):
        return DOMAIN
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return TIMEOUT
    if isinstance(error, ServerError) and not is_retryable(error):
        return TOO_LONG if any(words in str(error).lower() for words in _TOO_LONG_WORDS) else DOMAIN
    if isinstance(error, (TransportError, aiohttp.ClientError, ConnectionError)):
        return TRANSPORT
    return DOMAIN


def describe_failure(error: BaseException, function: str, problem: dict) -> str:
    """Describes a failure in one line: function, exception and where it was raised, problem. Records hold it."""
    place = ""
    if not isinstance(error, PipelineRLError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            place = f" at {frames[-1].filename}:{frames[-1].lineno}"
    said = shorten(redacted(str(error)), MAX_ERROR_CHARS)
    return f"{function} raised {type(error).__name__}: {said}{place}; problem: {shorten(repr(problem), 300)}"


def shorten(text: str, limit: int) -> str:
    """Cuts the text to ``limit`` characters and escapes those that UTF-8 cannot encode."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


class DomainErrors:
    """Counts failures ``OF_THE_DOMAIN``. More than ``limit`` (``actor.max_domain_errors``) of them end the role."""

    def __init__(self, limit: int):
        self._limit = limit
        self.count = 0

    def add(self, detail: str) -> None:
        """Counts one failure. Raises ``DomainError`` beyond the limit."""
        self.count += 1
        if self.count > self._limit:
            raise DomainError(
                f"{self.count} rollouts failed in the domain's code, "
                f"more than actor.max_domain_errors={self._limit}; the last: {detail}"
            )
