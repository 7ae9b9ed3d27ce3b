"""The exceptions that PipelineRL raises on purpose.

    PipelineRLError
    ├── ConfigError (ValueError)     the configuration, before anything starts
    ├── WorldError (ValueError)      an impossible placement, with the numbers
    ├── DomainError (ValueError)     a user's loader or rollout function broke its contract
    │   └── DatasetError             a data set cannot be used, with its name
    ├── RecordError (ValueError)     a record that may not reach a gradient, with its identity
    ├── StreamError                  a topic cannot be read or written
    │   └── CorruptStreamError       bytes that fail their frame or checksum
    ├── TransportError               no answer, a broken connection
    │   └── ServerError              an HTTP status that says the server failed
    ├── VerifierError                the verifier could not judge (never a reward)
    ├── WeightUpdateError            a server did not take an update
    │   └── ServersExpelledError     no server is left that uses the weights it is sent
    ├── CheckpointError              a checkpoint cannot be written or read
    ├── LeftError                    a role was asked to leave the run, and did
    ├── DeadlineError (TimeoutError) a named wait expired: who was awaited, where its log is
    └── RoleFailed                   a role ended the run: name, log file, last error

Users catch ``PipelineRLError``. Messages name the key, the value received, the constraint and the fix.
"""

import errno
import os
import re
import sys
from collections.abc import Callable

EXIT_REFUSED = 2
"""Exit code of a program that refuses its command line, its configuration or the run folder. A restart cannot help."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, marks of writing direction, other line ends, half characters."""


def visible(text: str) -> str:
    """Returns the text with a visible sign in place of each control character, so that none affects a terminal.

    >>> visible("\\x1b[2J\\r")
    '␛[2J␍'
    """
    return CONTROL.sub(lambda found: chr(0x2400 + ord(found[0])) if found[0] < " " else "\ufffd", text)


def told_in_one_line(main: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    A ``PipelineRLError`` and a file that cannot be used become one line on stderr and exit code 2. The command ends
    quietly when the reader of standard output has seen enough (`pipelinerl --help | head`).
    """
    try:
        code = main()
        sys.stdout.flush()
        return code
    except PipelineRLError as error:
        reason = str(error)
    except OSError as error:
        if error.filename is not None:
            reason = f"{error.filename}: {error.strerror}"
        elif error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python's flush at exit fails
            if error.errno == errno.EPIPE:
                return 0
            reason = f"the output cannot be written: {error.strerror}"
        else:
            raise
    print(f"error: {visible(reason)}", file=sys.stderr)
    return EXIT_REFUSED


class PipelineRLError(Exception):
    """Root of the tree."""


class ConfigError(PipelineRLError, ValueError):
    """The configuration is invalid. The message names key, value, constraint and fix."""


class WorldError(PipelineRLError, ValueError):
    """No placement satisfies the requested world."""


class DomainError(PipelineRLError, ValueError):
    """A dataset loader or rollout function broke its contract."""


class DatasetError(DomainError):
    """A data set cannot be used. ``names``: the data sets that may be the cause, as in the configuration."""

    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


class RecordError(PipelineRLError, ValueError):
    """A record is invalid. The message carries its identity (group, attempt, sequence)."""


class StreamError(PipelineRLError):
    """A topic cannot be read or written."""


class RecordTooLarge(StreamError):
    """A record exceeds ``streams.max_record_mb``. The message says by how much."""


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
    """The verifier could not judge an answer. This error is never turned into a reward."""


class WeightUpdateError(PipelineRLError):
    """An inference server did not accept a weight update."""


class ServersExpelledError(WeightUpdateError):
    """No inference server is left, because none of them used the weights it received."""


class CheckpointError(PipelineRLError):
    """A checkpoint cannot be written or read."""


class LeftError(PipelineRLError):
    """A role left the run on request, after finishing its work in progress. It has not failed: do not restart it."""


class DeadlineError(PipelineRLError, TimeoutError):
    """A named wait expired. The message says which role was awaited and where its log is."""


class RoleFailed(PipelineRLError):
    """A role failed for good. The message carries its name, log file and last error line."""
