"""Finds the reason for an exception that ended a rollout, and describes it. Pure."""

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
from pipelinerl.records.drops import DropReason

OF_THE_DOMAIN = frozenset({DropReason.DOMAIN_ERROR, DropReason.NO_TRAINED_TOKENS})
"""The domain's own code will fail again, so these count towards ``actor.max_domain_errors``."""

MAX_ERROR_CHARS, MAX_PROBLEM_CHARS = 2000, 300
"""Of an exception's text and of the problem in a failure, which logs and records hold."""

_TOO_LONG_WORDS = ("maximum model length", "maximum context length", "max_model_len", "longer than the maximum")


def classify(error: BaseException) -> DropReason:
    if isinstance(error, VerifierError):
        return DropReason.VERIFIER
    if isinstance(error, SequenceTooLong):
        return DropReason.TOO_LONG
    if isinstance(error, (DomainError, RecordError)):
        return DropReason.DOMAIN_ERROR
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return DropReason.TIMEOUT
    if isinstance(error, ServerError) and not is_retryable(error):
        too_long = any(words in str(error).lower() for words in _TOO_LONG_WORDS)
        return DropReason.PROMPT_TOO_LONG if too_long else DropReason.DOMAIN_ERROR
    if isinstance(error, (TransportError, aiohttp.ClientError, ConnectionError)):
        return DropReason.TRANSPORT
    return DropReason.DOMAIN_ERROR


def describe_failure(error: BaseException, function: str, problem: dict) -> str:
    """Describes a failure in one line: function, exception and where it was raised, problem. Records hold it."""
    place = ""
    if not isinstance(error, PipelineRLError):
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            place = f" at {frames[-1].filename}:{frames[-1].lineno}"
    text, given = shorten(redacted(str(error)), MAX_ERROR_CHARS), shorten(repr(problem), MAX_PROBLEM_CHARS)
    return f"{function} raised {type(error).__name__}: {text}{place}; problem: {given}"


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
