"""The bounded archive of a run: `archive/<job>/step_<n>.kept` and `.rest` in the run folder.

The preprocessor archives rollouts with their outcomes, every trainer rank its log-probabilities of the same rollouts.
`kept` has the chosen and the flagged rollouts of a step, `rest` the others. Beyond the bound the oldest `rest` is
deleted first, then steps are thinned evenly. If the disk is full, a step is missing and the run continues.
"""

import hashlib
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pipelinerl.config.sections import ArchiveSection
from pipelinerl.errors import StreamError
from pipelinerl.records.archive import TRAINED
from pipelinerl.records.drops import DropReason
from pipelinerl.records.rollouts import Rollout
from pipelinerl.streams.codec import Codec
from pipelinerl.world.disk import replace_file

UNFLAGGED = (TRAINED, DropReason.ZERO_ADVANTAGE)
"""Outcomes that are not flags. The second is frequent in healthy runs."""
REWARD_WITHOUT_SUCCESS = "reward_without_success"
LONGEST = "longest"


def chosen(sample_ids: Iterable[str], count: int) -> set[str]:
    """Choose ``count`` of the samples (`<group_id>/<attempt>`) by their names, with attempts of one problem together.

    A sample that is chosen from a set is also chosen from every subset that contains it, so that all processes agree.
    """
    return set(sorted(set(sample_ids), key=_place)[:count])


def _place(sample_id: str) -> tuple[bytes, int]:
    group_id, _, attempt = sample_id.rpartition("/")
    return hashlib.blake2b(group_id.encode(), digest_size=8).digest(), int(attempt)


def flags_of(rollouts: Sequence[tuple[Rollout, str]]) -> list[tuple[str, ...]]:
    """Return the flags of each of a step's rollouts, which are given with their outcomes.

    - The reason why it was dropped, unless it is in `UNFLAGGED`.
    - `reward_without_success`: it failed, but its reward is above the median of rollouts that succeeded.
    - `longest`: it has the most sampled tokens of the step.
    """
    wins = [rollout.reward for rollout, _ in rollouts if rollout.metrics.get("success")]
    usual = statistics.median(wins) if wins else None
    lengths = [rollout.num_sampled for rollout, _ in rollouts]
    longest = lengths.index(max(lengths)) if lengths else -1
    found = []
    for index, (rollout, outcome) in enumerate(rollouts):
        flags = [outcome] if outcome not in UNFLAGGED else []
        if usual is not None and rollout.metrics.get("success") == 0 and rollout.reward > usual:
            flags.append(REWARD_WITHOUT_SUCCESS)
        if index == longest:
            flags.append(LONGEST)
        found.append(tuple(flags))
    return found


log = logging.getLogger(__name__)

R = TypeVar("R")

ARCHIVE_DIR = "archive"
KEPT, REST = "kept", "rest"
_NAME = re.compile(r"step_(\d+)\.(kept|rest)")


class StepFile(NamedTuple):
    step: int
    part: str
    """`kept` or `rest`."""

    @property
    def name(self) -> str:
        return f"step_{self.step:08d}.{self.part}"


class StepArchive(Generic[R]):
    """Writes one job's part of the archive. Only one thread may use it.

    Args:
        folder: created at the first write.
        record_type: type of the records in the files.
        max_bytes: bound on all files together. The newest step's `kept` stays regardless of its size.
        last_steps: number of newest steps whose `rest` stays.
        per_step: number of rollouts that are chosen of every step.
    """

    def __init__(self, folder: Path, record_type: type[R], *, max_bytes: int, last_steps: int, per_step: int):
        self._folder = folder
        self._codec: Codec[R] = Codec(record_type)
        self._max_bytes, self._last_steps = max_bytes, last_steps
        self.per_step = per_step
        self._sizes = sizes_in(folder)
        self._warned = False

    def write(self, step: int, *, kept: R, rest: R) -> None:
        """Write a step, replacing an earlier version of it, and delete files beyond the bound.

        An error of the disk is logged once and not raised.

        Args:
            kept: chosen and flagged rollouts.
            rest: all other rollouts.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part, record in ((KEPT, kept), (REST, rest)):
                file, payload = StepFile(step, part), self._codec.encode(record)
                replace_file(self._folder / file.name, payload, mode=0o600)
                self._sizes[file] = len(payload)
            for file in surplus(self._sizes, step, last_steps=self._last_steps, max_bytes=self._max_bytes):
                (self._folder / file.name).unlink(missing_ok=True)
                del self._sizes[file]
        except OSError as error:
            if not self._warned:
                log.warning("event=archive_lost folder=%s step=%d error=%s", self._folder, step, error)
            self._warned = True


def open_archive(
    section: ArchiveSection, run_dir: Path, name: str, record_type: type[R], *, share: float
) -> StepArchive[R] | None:
    """Open the archive of a job with its share of `archive.archive_mb`. Returns None if `archive_mb` is 0.

    Args:
        name: the job's.
        record_type: type of the records in the files.
        share: fraction of `archive.archive_mb`.
    """
    if not section.archive_mb:
        return None
    return StepArchive(
        run_dir / ARCHIVE_DIR / name,
        record_type,
        max_bytes=int(section.archive_mb * 2**20 * share),
        last_steps=section.last_steps,
        per_step=section.rollouts_per_step,
    )


def sizes_in(folder: Path) -> dict[StepFile, int]:
    """Return the archive's files and their sizes in bytes."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            found[StepFile(int(match[1]), match[2])] = path.stat().st_size
    return found


def surplus(sizes: Mapping[StepFile, int], newest: int, *, last_steps: int, max_bytes: int) -> list[StepFile]:
    """Return the files to delete after a step was written. Pure.

    Args:
        sizes: bytes of each file.
        newest: the step that was written.
        last_steps, max_bytes: see ``StepArchive``.
    """
    gone = [file for file in sizes if file.part == REST and file.step <= newest - last_steps]
    left = {file: size for file, size in sizes.items() if file not in set(gone)}
    total = sum(left.values())
    rests = sorted((file for file in left if file.part == REST and file.step != newest), reverse=True)
    steps = sorted(file.step for file in left if file.part == KEPT)
    while total > max_bytes:
        if rests:
            file = rests.pop()
        elif len(steps) > 2:
            file = StepFile(_least_missed(steps), KEPT)
            steps.remove(file.step)
        elif (file := StepFile(newest, REST)) not in left:
            break
        gone.append(file)
        total -= left.pop(file)
    return gone


def _least_missed(steps: list[int]) -> int:
    """Return the step between first and last whose removal leaves the smallest gap. The oldest one wins a tie."""
    gaps = [(after - before, step) for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)]
    return min(gaps)[1]


def read_archive(
    run_dir: Path, kind: str, record_type: type[R], step: int | None = None
) -> Iterator[tuple[int, str, list[R]]]:
    """Yield (step, job's name, records of its files) of every job of a kind, by step.

    A file that cannot be read, such as after a power cut, is left out with a warning.

    Args:
        kind: kind of the jobs, such as ``actor``.
        record_type: type of the records in the files.
        step: the only step to read. None: all steps.
    """
    codec: Codec[R] = Codec(record_type)
    places: dict[tuple[int, str], list[StepFile]] = defaultdict(list)
    for folder in sorted((run_dir / ARCHIVE_DIR).glob(f"{kind}_*")):
        for file in sizes_in(folder):
            if step in (None, file.step):
                places[file.step, folder.name].append(file)
    for (number, name), files in sorted(places.items()):
        records: list[Any] = []
        for file in sorted(files):
            path = run_dir / ARCHIVE_DIR / name / file.name
            try:
                records.append(codec.decode(path.read_bytes()))
            except FileNotFoundError:  # a live run has just deleted it
                continue
            except (OSError, StreamError) as error:
                log.warning("event=archive_unreadable file=%s error=%s", path, error)
        if records:
            yield number, name, records
