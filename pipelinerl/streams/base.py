"""The interface of a streams backend: one append-only log of payloads per stream. ``api`` adds record types.

Every backend keeps these invariants, and the contract tests check them:

- Offsets of a stream are 0, 1, 2, … without gaps, also across restarts, recovery and trimming.
- A stream has one writer at a time. A second writer is refused, or takes over and blocks the first.
- A cursor delivers exactly the appended bytes in order. Damaged bytes raise an error and never become a record.
- A record is deleted only when every named reader's durable position is beyond it. The newest record is never deleted.
- Damage below the position of every named reader stops neither readers nor the writer.
- ``barrier`` and ``sync`` make a record durable before anything that refers to it. A power cut can therefore remove
  the end of a stream, but never a record that something durable refers to.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pipelinerl.config.sections import Config
from pipelinerl.config.variables import with_values
from pipelinerl.streams.frames import MAX_PAYLOAD_BYTES, Buffer
from pipelinerl.streams.spec import SingleStreamSpec

MAX_RECORDS_PER_READ = 256
"""Records of one read, so that a reader that is far behind holds few at a time."""
RETENTION = "retention"
"""Name of the writer's own reader on a topic without other named readers. It bounds the topic and reads no record."""


class Appender(ABC):
    """The only writer of a stream. Use it from one thread."""

    next_offset: int
    """Offset of the next record to be appended = number of records ever appended."""

    @abstractmethod
    def append(self, payload: bytes) -> int:
        """Appends one record and returns its offset. Readers can read it when this returns."""

    @abstractmethod
    def last(self) -> bytes | None:
        """Returns the payload of record ``next_offset - 1``, or None if no record was ever appended."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where records are durable at once, or never
        """Makes every record appended so far durable, if the backend can."""

    def barrier(self) -> None:
        """Orders durability: later writes to any stream become durable only after the records appended here so far."""
        self.sync()

    @abstractmethod
    def close(self) -> None:
        """Releases the stream, so that another process may write it. May be called more than once."""


class Cursor(ABC):
    """One reader of a stream. Use it from one thread, except for ``sync``."""

    position: int
    """Offset of the next record that ``read`` returns."""

    @abstractmethod
    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        """Returns the next records as (offset, payload), at most ``MAX_RECORDS_PER_READ``.

        Waits up to ``timeout_s`` for the first record (0 = do not wait). The list is empty if none arrived.
        """

    @abstractmethod
    def commit(self, offset: int) -> None:
        """Makes ``offset`` the durable position, which never moves back. This reader needs no record below it."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where records are durable at once, or never
        """Makes the records read so far durable, if the backend can. Any thread may call it."""

    def barrier(self) -> None:
        """Orders durability: later writes to any stream become durable only after the records read here so far."""
        self.sync()

    def skip_damage(self) -> bool:
        """Moves past the damage after a ``CorruptStreamError``. Returns False if no whole record follows it."""
        return False

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """Size and offsets of one stream. ``positions`` holds the durable position of every named reader."""

    spec: SingleStreamSpec
    first_offset: int
    """Offset of the oldest record that still exists."""
    next_offset: int
    size_bytes: int
    positions: dict[str, int] = field(default_factory=dict)


class Backend(ABC):
    """Opens streams and holds the connection settings. Threads may share a backend, but not the streams it opens."""

    max_record_bytes: int = MAX_PAYLOAD_BYTES
    """Writers and readers refuse larger records."""

    @classmethod
    def from_config(cls, cfg: Config, run_dir: Path) -> Self:
        """Creates the backend of the run in ``run_dir`` from its configuration."""
        return cls(**with_values(cfg.streams.options, os.environ, "streams.options"))

    @abstractmethod
    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        """Opens the writer of ``spec`` and recovers the stream after a killed writer."""

    @abstractmethod
    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        """Opens a reader of ``spec``. The stream need not exist yet.

        Args:
            name: name of the durable position, which protects records from deletion. None = no durable position. A new
                name gets its durable position here, at the first offset to read.
            start: first offset to read. None = the durable position, else the oldest record.

        Raises:
            StreamError: ``start`` is below the oldest record or beyond the next one. The name gets no position then.
        """

    @abstractmethod
    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        """Returns every stream of the run in ``exp_path``, sorted."""

    @abstractmethod
    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        """Returns size, offsets and reader positions of one stream."""

    @abstractmethod
    def delete(self, spec: SingleStreamSpec) -> None:
        """Deletes the stream and its readers' positions. Its writer and readers must be closed."""
