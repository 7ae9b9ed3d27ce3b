"""The files backend: opens, lists and deletes the streams in a run folder."""

import shutil
from pathlib import Path
from typing import Self

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.streams.base import Appender, Backend, Cursor, StreamStats
from pipelinerl.streams.files.appender import FilesAppender, Fsync
from pipelinerl.streams.files.cursor import FilesCursor
from pipelinerl.streams.files.folder import clear_errors, reader_positions, segment_bases, segment_path
from pipelinerl.streams.files.segment import scan
from pipelinerl.streams.spec import SingleStreamSpec


class FilesBackend(Backend):
    """Streams in the run folder.

    Args:
        segment_mb: the writer begins a new segment once the current one has reached this size.
        fsync: what a power cut may take. ``never``: any record that the kernel had not written. ``segment``: records
            that nothing durable refers to. ``always``: none.
        max_record_mb: writer and reader refuse larger records (1 to 2047).
    """

    def __init__(self, *, segment_mb: int = 64, fsync: Fsync = "segment", max_record_mb: int = 512):
        if fsync not in ("never", "segment", "always"):
            raise ConfigError(f"streams.fsync is {fsync!r}: use never, segment or always")
        if not 0 < max_record_mb < 2048:
            raise ConfigError(f"streams.max_record_mb is {max_record_mb}: it must be 1 to 2047")
        self._segment_bytes = segment_mb << 20
        self._fsync: Fsync = fsync
        self.max_record_bytes = max_record_mb << 20

    @classmethod
    def from_config(cls, cfg: Config, run_dir: Path) -> Self:
        streams = cfg.streams
        return cls(segment_mb=streams.segment_mb, fsync=streams.fsync, max_record_mb=streams.max_record_mb)

    def open_appender(self, spec: SingleStreamSpec) -> Appender:
        return FilesAppender(spec, self._segment_bytes, self._fsync, self.max_record_bytes)

    def open_cursor(self, spec: SingleStreamSpec, name: str | None, start: int | None) -> Cursor:
        return FilesCursor(spec, name, start, max_bytes=self.max_record_bytes, durable=self._fsync != "never")

    def specs(self, exp_path: Path) -> list[SingleStreamSpec]:
        root = Path(exp_path) / "streams"
        found = (path.relative_to(root).parts for path in root.glob("*/*/*") if path.is_dir())
        return sorted(
            (SingleStreamSpec(exp_path, topic, int(instance), int(partition)) for topic, instance, partition in found),
            key=lambda spec: (spec.topic, spec.instance, spec.partition),
        )

    def stats(self, spec: SingleStreamSpec) -> StreamStats:
        with clear_errors("read", spec.path):
            bases = segment_bases(spec.path)
            size = sum(segment_path(spec.path, base).stat().st_size for base in bases)
            end = scan(spec.path, bases[-1], self.max_record_bytes).next_offset if bases else 0
            return StreamStats(
                spec=spec,
                first_offset=bases[0] if bases else 0,
                next_offset=end,
                size_bytes=size,
                positions=reader_positions(spec.path),
            )

    def delete(self, spec: SingleStreamSpec) -> None:
        with clear_errors("delete", spec.path):
            if spec.path.exists():
                shutil.rmtree(spec.path)
