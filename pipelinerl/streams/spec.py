"""Names of streams: run folder, topic, instance and partition. Pure values that open nothing."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.config.origin import named_folder
from pipelinerl.errors import ConfigError

_TOPIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class SingleStreamSpec:
    """One partition of one topic. One process writes it, and any number of processes read it.

    Example: ``SingleStreamSpec(exp_path="results/guessing", topic="actor")``.
    """

    exp_path: Path
    """The run folder."""
    topic: str
    instance: int = 0
    """Replica index of the writer."""
    partition: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "exp_path", Path(self.exp_path))
        _check_topic(self.topic)
        _check_index("instance", self.instance)
        _check_index("partition", self.partition)

    def __str__(self) -> str:
        return f"{self.topic}/{self.instance}/{self.partition}"

    @property
    def path(self) -> Path:
        """Where the ``files`` backend keeps this stream."""
        return self.exp_path / "streams" / self.topic / str(self.instance) / str(self.partition)


@dataclass(frozen=True)
class StreamRangeSpec:
    """Consecutive partitions of one topic, written by one process. ``partition_range`` is (first, end exclusive)."""

    exp_path: Path
    topic: str
    instance: int = 0
    partition_range: tuple[int, int] = field(default=(0, 1))

    def __post_init__(self) -> None:
        object.__setattr__(self, "exp_path", Path(self.exp_path))
        _check_topic(self.topic)
        _check_index("instance", self.instance)
        first, end = self.partition_range
        if not 0 <= first < end:
            raise ConfigError(
                f"partition_range is {self.partition_range}: it must be (first, end) with 0 <= first < end"
            )

    def __str__(self) -> str:
        first, end = self.partition_range
        return f"{self.topic}/{self.instance}/{first}-{end - 1}"

    def __iter__(self) -> Iterator[SingleStreamSpec]:
        return (SingleStreamSpec(self.exp_path, self.topic, self.instance, p) for p in range(*self.partition_range))


StreamSpec = SingleStreamSpec | StreamRangeSpec


def run_key(run_dir: str | Path, run_id: str | None = None) -> str:
    """Returns a key that is unique to the run on a shared server: folder name and a digest of path and run id.

    The path is the one under which the run was made, so that a run folder that was moved keeps its key.
    """
    folder = named_folder(run_dir)
    digest = hashlib.sha256(f"{folder}\n{run_id or ''}".encode()).hexdigest()[:12]
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', folder.name)}-{digest}"


def _check_topic(topic: str) -> None:
    if not _TOPIC.fullmatch(topic):
        raise ConfigError(f"topic is {topic!r}: use letters, digits, '_', '-' and '.', not starting with '.' or '-'")


def _check_index(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} is {value!r}: it must be an integer of 0 or more")
