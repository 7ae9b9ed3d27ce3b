"""`python -m pipelinerl.streams verify RUN`: finds damage in a run's streams and whom it matters to. Changes nothing.

Records are missing if a named reader's position, an actor's snapshot or a checkpoint points beyond the end of the
stream. Damage matters to a named reader that has not read the records yet. Other readers skip damage.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import CorruptStreamError
from pipelinerl.streams.api import get_streams_backend
from pipelinerl.streams.base import RETENTION, StreamStats
from pipelinerl.streams.epoch import read_epoch
from pipelinerl.streams.frames import only_payload
from pipelinerl.streams.spec import SingleStreamSpec


@dataclass(frozen=True, kw_only=True)
class UnreadableRecords:
    """Records ``first`` … ``end - 1`` of a stream, which are damaged or missing."""

    stream: str
    first: int
    end: int
    reason: str
    readers: Mapping[str, bool] = field(default_factory=dict)
    """Whether they matter, by name of the reader or pointer."""

    @property
    def matters(self) -> bool:
        return any(self.readers.values())


def verify(run_dir: Path) -> list[UnreadableRecords]:
    """Return all damage of the streams. The streams backend must be set."""
    backend = get_streams_backend()
    damaged = []
    ends: dict[str, int] = {}
    for spec in backend.specs(run_dir):
        stored = backend.stats(spec)
        ends[str(spec)] = max([stored.next_offset, *stored.positions.values()])
        damaged += [*_unreadable(spec, stored), *_lost_end(stored)]
    for name, stream, offset in pointers(run_dir):
        end = ends.get(stream, 0)
        if offset > end:
            reason = f"{name} points at record {offset}, but the stream ends before record {end}"
            damaged.append(UnreadableRecords(stream=stream, first=end, end=offset, reason=reason, readers={name: True}))
    return damaged


def _unreadable(spec: SingleStreamSpec, stored: StreamStats) -> Iterator[UnreadableRecords]:
    cursor = get_streams_backend().open_cursor(spec, None, None)
    try:
        while True:
            try:
                if not cursor.read(0):
                    return
            except CorruptStreamError as error:
                first = cursor.position
                goes_on = cursor.skip_damage()
                end = max(cursor.position if goes_on else stored.next_offset, first + 1)
                yield UnreadableRecords(
                    stream=str(spec), first=first, end=end, reason=str(error), readers=_needing(stored, end)
                )
                if not goes_on:
                    return
    finally:
        cursor.close()


def _lost_end(stored: StreamStats) -> list[UnreadableRecords]:
    highest = max(stored.positions.values(), default=0)
    if highest <= stored.next_offset:
        return []
    reason = f"a reader has read up to record {highest}, but the stream ends before record {stored.next_offset}"
    end = stored.next_offset
    return [
        UnreadableRecords(
            stream=str(stored.spec), first=end, end=highest, reason=reason, readers=_needing(stored, highest)
        )
    ]


def _needing(stored: StreamStats, end: int) -> dict[str, bool]:
    return {name: position < end for name, position in stored.positions.items() if name != RETENTION}


def pointers(run_dir: Path) -> Iterator[tuple[str, str, int]]:
    """Yield (owner, stream, record) of each snapshot and checkpoint that continues at a record of the present epoch."""
    for path in sorted(run_dir.glob("actor_*/progress.msgpack")):
        try:
            offset = int(msgspec.msgpack.decode(only_payload(path.read_bytes()))["offset"])
        except (OSError, ValueError, KeyError, TypeError, CorruptStreamError):
            continue
        yield f"{path.parent.name}'s snapshot", f"actor/{path.parent.name.removeprefix('actor_')}/0", offset
    number = read_epoch(run_dir).number
    for path in sorted(run_dir.glob("checkpoints/step_*/manifest.json")):
        counters = _counters(path)
        if counters.get("epoch", 1) == number:
            for key, offset in counters.get("positions", {}).items():
                yield f"checkpoint {path.parent.name}", f"training_data/{key}", offset


def _counters(manifest: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(manifest.read_bytes())["counters"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def damage_lines(damaged: list[UnreadableRecords], run_dir: Path) -> Iterator[str]:
    """Describe the damage in lines of text."""
    for damage in damaged:
        records = (
            f"record {damage.first}"
            if damage.end == damage.first + 1
            else (f"records {damage.first} to {damage.end - 1}")
        )
        yield f"{damage.stream}: {records}: {damage.reason}"
        for name, matters in sorted(damage.readers.items()):
            yield f"    {name}: {'MATTERS, it has yet to read this' if matters else 'does not matter, it is past this'}"
        if not damage.readers:
            yield "    does not matter: only newest records of this topic are read"
    if not damaged:
        yield f"no damage in the streams of {run_dir}"
    elif any(damage.matters for damage in damaged):
        yield "the streams cannot be continued: the same command with resume=checkpoint continues from the newest good"
        yield "checkpoint, with new streams; the old ones are kept in lost/"
    else:
        yield "the run can be resumed: no reader needs the damaged part"
