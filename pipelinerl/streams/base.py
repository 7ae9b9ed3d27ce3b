"""What a backend provides: an append-only log of payloads per stream. Types and meaning are added in ``api``.

Invariants every backend keeps, and the contract tests hold it to:

- Offsets of a stream are 0, 1, 2, … without gaps, for ever: also over restarts, recovery and trimming.
- One writer per stream at a time; a second one is refused, or fences off the first.
- A cursor delivers exactly the appended bytes in order; damaged bytes are an error, never a record.
- A record is deleted only when every named reader's durable position is beyond it. The newest record is never deleted.
- Damage below the position of every named reader keeps nobody from reading and writing on.
- With ``barrier`` and ``sync``, whatever points at a record is durable only after it: a power cut loses ends, no order.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pipelinerl.config.sections import Config
from pipelinerl.streams.frames import MAX_PAYLOAD_BYTES, Buffer
from pipelinerl.streams.spec import SingleStreamSpec

MAX_RECORDS_PER_READ = 256
RETENTION = "retention"
"""Reader of a topic that nobody follows: its writer's own, which bounds the topic and needs no record."""


class Appender(ABC):
    """The one writer of a stream. Used by one thread."""

    next_offset: int
    """Offset that the next record gets = records ever appended."""

    @abstractmethod
    def append(self, payload: bytes) -> int:
        """Adds one record and returns its offset; it is readable when this returns."""

    @abstractmethod
    def last(self) -> bytes | None:
        """Payload of record ``next_offset - 1``; None when nothing was ever appended."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where records are durable at once, or never
        """Makes every record appended so far durable where the backend can."""

    def barrier(self) -> None:
        """What is written to any stream from now on becomes durable only after every record appended here so far."""
        self.sync()

    @abstractmethod
    def close(self) -> None:
        """Gives the stream up, so that another process may write it. Harmless when repeated."""


class Cursor(ABC):
    """One reader of a stream. Used by one thread."""

    position: int
    """Offset of the next record that ``read`` returns."""

    @abstractmethod
    def read(self, timeout_s: float) -> list[tuple[int, Buffer]]:
        """Next records, at most ``MAX_RECORDS_PER_READ``, as (offset, payload).

        Waits up to ``timeout_s`` for the first (0 = do not wait); empty when none came.
        """

    @abstractmethod
    def commit(self, offset: int) -> None:
        """Makes ``offset`` this reader's durable position: nothing below it is needed any more. Never moves back."""

    def sync(self) -> None:  # noqa: B027 - nothing to do where records are durable at once, or never
        """Makes what was read durable where the backend can. The one method for any thread."""

    def barrier(self) -> None:
        """What is written to any stream from now on becomes durable only after every record read here so far."""
        self.sync()

    def skip_damage(self) -> bool:
        """After ``CorruptStreamError``: goes on behind the damage. False where nothing that is whole follows."""
        return False

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StreamStats:
    """What is stored of one stream. ``positions``: durable position of every named reader."""

    spec: SingleStreamSpec
    first_offset: int
    """Oldest record that is still there."""
    next_offset: int
    size_bytes: int
    positions: dict[str, int] = field(default_factory=dict)


class Backend(ABC):
    """Opens streams; holds the connection settings. A Backend may be used by several threads, what it opens may not."""

    max_record_bytes: int = MAX_PAYLOAD_BYTES
    """Larger records are refused, when written and when read."""

    @classmethod
    def from_config(cls, cfg: Config, run_dir: Path) -> Self:
        """The backend of a run, as its configuration wants it."""
        return cls(**cfg.streams.options)

    @abstractmethod
    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        """The writer of ``spec``; recovers what a killed writer left behind."""

    @abstractmethod
    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        """A reader of ``spec``, which need not exist yet.

        Args:
            name: names the durable position, which keeps records from deletion; None = leaves no trace.
            start: first offset to read; None = the durable position, or the oldest record where there is none.
        """

    @abstractmethod
    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        """Every stream of the run, sorted."""

    @abstractmethod
    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        """Counts of one stream."""

    @abstractmethod
    def delete(self, spec: SingleStreamSpec) -> None:
        """Removes the stream with its readers' positions; its writer and readers must be gone."""
