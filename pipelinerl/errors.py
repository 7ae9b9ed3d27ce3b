"""Every exception PipelineRL raises on purpose.

    PipelineRLError
    ├── ConfigError (ValueError)     the configuration, before anything starts
    ├── WorldError (ValueError)      an impossible placement, with the numbers
    ├── DomainError (ValueError)     a user's loader or rollout function broke its contract
    ├── RecordError (ValueError)     a record that may not reach a gradient, with its identity
    ├── StreamError                  a topic cannot be read or written
    │   └── CorruptStreamError       bytes that fail their frame or checksum
    ├── TransportError               no answer, a broken connection
    │   └── ServerError              an HTTP status that says the server failed
    ├── VerifierError                the verifier could not judge (never a reward)
    ├── WeightUpdateError            a server did not take an update
    │   └── ServersExpelledError     no server is left that uses what it is sent
    ├── CheckpointError              a checkpoint cannot be written or read
    ├── LeftError                    a role was asked to leave the run, and did
    ├── DeadlineError (TimeoutError) a named wait expired: who was awaited, where its log is
    └── RoleFailed                   a role ended the run: name, log file, last error

Users catch ``PipelineRLError``; messages name the key, the value received, the constraint and the fix.
"""

import sys
from collections.abc import Callable


def told_in_one_line(main: Callable[[], int]) -> int:
    """The exit code of a command; a refusal is one line on stderr and exit code 2."""
    try:
        return main()
    except PipelineRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


class PipelineRLError(Exception):
    """Root of the tree."""


class ConfigError(PipelineRLError, ValueError):
    """The configuration is refused; the message names key, value, constraint and fix."""


class WorldError(PipelineRLError, ValueError):
    """No placement satisfies the requested world."""


class DomainError(PipelineRLError, ValueError):
    """A dataset loader or rollout function broke its contract."""


class RecordError(PipelineRLError, ValueError):
    """A record is invalid; the message carries its identity (group, attempt, sequence)."""


class StreamError(PipelineRLError):
    """A topic cannot be read or written."""


class RecordTooLarge(StreamError):
    """A record exceeds ``streams.max_record_mb``; the message says by how much."""


class CorruptStreamError(StreamError):
    """Stream bytes fail their frame or checksum."""


class TransportError(PipelineRLError):
    """A peer did not answer: connection refused, reset, timed out."""


class ServerError(TransportError):
    """A peer answered with a failure status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class VerifierError(PipelineRLError):
    """The verifier could not judge an answer; this is never turned into a reward."""


class WeightUpdateError(PipelineRLError):
    """An inference server did not take a weight update."""


class ServersExpelledError(WeightUpdateError):
    """No inference server is left: each of them did not use the weights that it was sent."""


class CheckpointError(PipelineRLError):
    """A checkpoint cannot be written or read."""


class LeftError(PipelineRLError):
    """A role was asked to leave the run and has ended what was under way: no failure, and no reason to restart it."""


class DeadlineError(PipelineRLError, TimeoutError):
    """A named wait expired; the message says who was awaited and where that log is."""


class RoleFailed(PipelineRLError):
    """A role failed for good; carries its name, log file and last error line."""
