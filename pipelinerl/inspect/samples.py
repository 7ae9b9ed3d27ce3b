"""Every rollout of a run that is still on record, with its fate: from the archive and from the topics.

Consumes the archive, topics `actor`, `actor_test` and `preprocessor`; changes nothing. The caller has opened the
streams (`outside.look_into`). Works while the run goes on, after it, and after it was killed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipelinerl.archive import read_archive
from pipelinerl.records import (
    ActorRecord,
    ArchivedRollout,
    ArchivedStep,
    PreprocessorProgress,
    Rollout,
    RolloutGroup,
    ScoredSequence,
    ScoredStep,
    topics,
)
from pipelinerl.records.archive import TRAINED
from pipelinerl.streams import SingleStreamSpec, open_reader

QUEUED = "queued"
"""Published, and not packed yet."""
EVALUATED = "evaluation"


@dataclass(frozen=True, kw_only=True)
class SeenRollout:  # structure: everything that is known of a rollout
    """A rollout as people see it."""

    group_id: str
    domain: str
    dataset: str
    problem: str
    rollout: Rollout
    fate: str
    """`trained`, the reason of a drop, `queued` or `evaluation`."""
    step: int | None
    """Optimizer step for which it was packed or dropped; None: not decided, or an evaluation."""
    dispatched_version: int
    advantages: tuple[float | None, ...] = ()
    flags: tuple[str, ...] = ()
    scores: tuple[ScoredSequence | None, ...] = ()
    """The trainer's numbers, one entry per sequence; empty where there are none."""

    @property
    def sample_id(self) -> str:
        return f"{self.group_id}/{self.rollout.attempt}"

    @property
    def is_test(self) -> bool:
        return self.fate == EVALUATED

    @property
    def advantage(self) -> float | None:
        """Of its first trained sequence."""
        return next((advantage for advantage in self.advantages if advantage is not None), None)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled it, ascending."""
        return tuple(sorted({v for sequence in self.rollout.sequences for v in sequence.spans[:, 2].tolist()}))

    @property
    def lag(self) -> int | None:
        """Optimizer steps from its oldest token to the step that trains it."""
        return self.step - self.versions[0] if self.step is not None and self.versions else None

    @property
    def num_sampled(self) -> int:
        return sum(len(sequence.logprobs) for sequence in self.rollout.sequences)

    @property
    def success(self) -> bool | None:
        value = self.rollout.metrics.get("success")
        return None if value is None else bool(value)

    @property
    def finish_reason(self) -> str:
        return self.rollout.sequences[-1].finish_reason if self.rollout.sequences else "nothing was sampled"


@dataclass
class _Settled:
    """What topic `preprocessor` says: sample → (fate, step)."""

    fates: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, progress: PreprocessorProgress) -> None:
        for sample_id, reason in progress.dropped_sample_ids:
            self.fates[sample_id] = (reason, progress.step)
        for sample_id in progress.packed_sample_ids:
            self.fates[sample_id] = (TRAINED, progress.step - 1)


def read_training(run_dir: Path, *, replicas: int = 1, step: int | None = None) -> Iterator[SeenRollout]:
    """Training rollouts by step, then those that are not packed yet; each once. ``step``: only those of one step."""
    scores = read_scores(run_dir, step)
    archived = set()
    for number, _, records in read_archive(run_dir, "preprocessor", ArchivedStep):
        for found in (rollout for record in records for rollout in record.rollouts):
            archived.add(found.sample_id)
            if step in (None, number):
                yield _from_archive(found, number, scores)
    for replica in range(replicas):
        settled = _Settled()
        with open_reader(
            SingleStreamSpec(run_dir, topics.PREPROCESSOR, replica), PreprocessorProgress, name=None
        ) as news:
            for _, progress in news.read_all():
                settled.add(progress)
        for group in _groups(run_dir, topics.ACTOR, replica):
            for rollout in group.rollouts:
                name = f"{group.group_id}/{rollout.attempt}"
                fate, number_or_none = settled.fates.get(name, (QUEUED, None))
                if name not in archived and step in (None, number_or_none):
                    yield _from_group(group, rollout, fate, number_or_none, scores)


def read_tests(run_dir: Path, *, replicas: int = 1) -> Iterator[SeenRollout]:
    """Evaluation rollouts that are still there."""
    for replica in range(replicas):
        for group in _groups(run_dir, topics.ACTOR_TEST, replica):
            yield from seen_group(group, EVALUATED)


def read_scores(run_dir: Path, step: int | None = None) -> dict[str, ScoredSequence]:
    """The trainer's numbers by sequence id."""
    return {
        sequence.sequence_id: sequence
        for number, _, records in read_archive(run_dir, "finetune", ScoredStep)
        if step in (None, number)
        for record in records
        for sequence in record.sequences
    }


def _groups(run_dir: Path, topic: str, replica: int) -> Iterator[RolloutGroup]:
    with open_reader(SingleStreamSpec(run_dir, topic, replica), ActorRecord, name=None) as reader:
        while batch := reader.poll(0):
            yield from (record for _, record in batch if isinstance(record, RolloutGroup))


def _from_archive(found: ArchivedRollout, step: int, scores: dict[str, ScoredSequence]) -> SeenRollout:
    return SeenRollout(
        group_id=found.group_id,
        domain=found.domain,
        dataset=found.dataset,
        problem=found.problem,
        rollout=found.rollout,
        fate=found.fate,
        step=step,
        dispatched_version=found.dispatched_version,
        advantages=found.advantages,
        flags=found.flags,
        scores=_scores_of(found.sample_id, found.rollout, scores),
    )


def seen_group(group: RolloutGroup, fate: str) -> list[SeenRollout]:
    """A group's rollouts by themselves."""
    return [_from_group(group, rollout, fate, None, {}) for rollout in group.rollouts]


def _from_group(
    group: RolloutGroup, rollout: Rollout, fate: str, step: int | None, scores: dict[str, ScoredSequence]
) -> SeenRollout:
    return SeenRollout(
        group_id=group.group_id,
        domain=group.domain,
        dataset=group.dataset,
        problem=group.problem,
        rollout=rollout,
        fate=fate,
        step=step,
        dispatched_version=group.dispatched_version,
        scores=_scores_of(f"{group.group_id}/{rollout.attempt}", rollout, scores),
    )


def _scores_of(
    sample_id: str, rollout: Rollout, scores: dict[str, ScoredSequence]
) -> tuple[ScoredSequence | None, ...]:
    found = tuple(scores.get(f"{sample_id}/{index}") for index in range(len(rollout.sequences)))
    return found if any(score is not None for score in found) else ()


def matching(
    rollouts: Iterable[SeenRollout], *, group: str | None = None, domain: str | None = None
) -> Iterator[SeenRollout]:
    """Those of one group (`0-17`) or attempt (`0-17/3`), and of one domain or data set."""
    for seen in rollouts:
        if group is not None and group not in (seen.group_id, seen.sample_id):
            continue
        if domain is None or domain in (seen.domain, seen.dataset):
            yield seen
