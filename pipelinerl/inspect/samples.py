"""Reads every rollout of a run that is still recorded, with its outcome, from the archive and the topics.

The caller must have opened the streams (`reading.look_into`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipelinerl.observability.archive import chosen, read_archive
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

PER_STEP = 16
"""Rollouts of an optimizer step that are looked at or shown, with the attempts at one problem together."""
QUEUED = "queued"
"""Outcome of a rollout that was published but not packed yet."""
EVALUATED = "evaluation"


@dataclass(frozen=True, kw_only=True)
class SeenRollout:
    """A rollout with all that is recorded about it."""

    group_id: str
    domain: str
    dataset: str
    problem: str
    rollout: Rollout
    outcome: str
    """`trained`, the reason why it was dropped, `queued` or `evaluation`."""
    step: int | None
    """Optimizer step for which it was packed or dropped. None if that is not decided, or for an evaluation."""
    dispatched_version: int
    advantages: tuple[float | None, ...] = ()
    flags: tuple[str, ...] = ()
    scores: tuple[ScoredSequence | None, ...] = ()
    """The trainer's log-probabilities and entropies, one entry per sequence. Empty if there are none."""

    @property
    def sample_id(self) -> str:
        return f"{self.group_id}/{self.rollout.attempt}"

    @property
    def is_test(self) -> bool:
        return self.outcome == EVALUATED

    @property
    def advantage(self) -> float | None:
        """Advantage of its first trained sequence."""
        return next((advantage for advantage in self.advantages if advantage is not None), None)

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled it, ascending."""
        return tuple(sorted(self.rollout.versions))

    @property
    def lag(self) -> int | None:
        """Optimizer steps from its oldest token to the step that trains it."""
        return self.step - self.versions[0] if self.step is not None and self.versions else None

    @property
    def success(self) -> bool | None:
        value = self.rollout.metrics.get("success")
        return None if value is None else bool(value)

    @property
    def finish_reason(self) -> str:
        return self.rollout.sequences[-1].finish_reason if self.rollout.sequences else "nothing was sampled"


def read_training(run_dir: Path, *, replicas: int = 1, step: int | None = None) -> Iterator[SeenRollout]:
    """Yield each training rollout once, by step and then those without one. ``step``: only those of one step."""
    scores = read_scored_sequences(run_dir, step)
    archived = set()
    for number, _, records in read_archive(run_dir, "preprocessor", ArchivedStep):
        for found in (rollout for record in records for rollout in record.rollouts):
            archived.add(found.sample_id)
            if step in (None, number):
                yield from_archive(found, number, scores)
    for replica in range(replicas):
        outcomes = _outcomes(run_dir, replica)
        for group in _groups(run_dir, topics.ACTOR, replica):
            for rollout in group.rollouts:
                name = f"{group.group_id}/{rollout.attempt}"
                outcome, number_or_none = outcomes.get(name, (QUEUED, None))
                if name not in archived and step in (None, number_or_none):
                    yield _from_group(group, rollout, outcome, number_or_none, scores)


def _outcomes(run_dir: Path, replica: int) -> dict[str, tuple[str, int]]:
    """(outcome, step) of each sample according to topic `preprocessor`."""
    found: dict[str, tuple[str, int]] = {}
    spec = SingleStreamSpec(run_dir, topics.PREPROCESSOR, replica)
    with open_reader(spec, PreprocessorProgress, name=None) as reader:
        for _, progress in reader.read_all():
            found |= {sample_id: (reason, progress.step) for sample_id, reason in progress.dropped_sample_ids}
            found |= dict.fromkeys(progress.packed_sample_ids, (TRAINED, progress.step - 1))
    return found


def read_tests(run_dir: Path, *, replicas: int = 1) -> Iterator[SeenRollout]:
    """Yield the evaluation rollouts that the topics still hold."""
    for replica in range(replicas):
        for group in _groups(run_dir, topics.ACTOR_TEST, replica):
            yield from seen_group(group, EVALUATED)


def read_scored_sequences(run_dir: Path, step: int | None = None) -> dict[str, ScoredSequence]:
    """Read the trainer's log-probabilities and entropies by sequence id. ``step``: only those of one step."""
    return {
        sequence.sequence_id: sequence
        for _, _, records in read_archive(run_dir, "finetune", ScoredStep, step)
        for record in records
        for sequence in record.sequences
    }


def _groups(run_dir: Path, topic: str, replica: int) -> Iterator[RolloutGroup]:
    with open_reader(SingleStreamSpec(run_dir, topic, replica), ActorRecord, name=None) as reader:
        yield from (record for _, record in reader.read_each() if isinstance(record, RolloutGroup))


def from_archive(found: ArchivedRollout, step: int, scores: dict[str, ScoredSequence]) -> SeenRollout:
    """An archived rollout of a step. ``scores``: the trainer's numbers by sequence id."""
    return SeenRollout(
        group_id=found.group_id,
        domain=found.domain,
        dataset=found.dataset,
        problem=found.problem,
        rollout=found.rollout,
        outcome=found.outcome,
        step=step,
        dispatched_version=found.dispatched_version,
        advantages=found.advantages,
        flags=found.flags,
        scores=_scores_of(found.sample_id, found.rollout, scores),
    )


def seen_group(group: RolloutGroup, outcome: str) -> list[SeenRollout]:
    """Return the rollouts of a group, all with the same outcome."""
    return [_from_group(group, rollout, outcome, None, {}) for rollout in group.rollouts]


def _from_group(
    group: RolloutGroup, rollout: Rollout, outcome: str, step: int | None, scores: dict[str, ScoredSequence]
) -> SeenRollout:
    return SeenRollout(
        group_id=group.group_id,
        domain=group.domain,
        dataset=group.dataset,
        problem=group.problem,
        rollout=rollout,
        outcome=outcome,
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
    """Filter rollouts by group (`0-17`) or attempt (`0-17/3`), and by domain or data set."""
    for seen in rollouts:
        if group is not None and group not in (seen.group_id, seen.sample_id):
            continue
        if domain is None or domain in (seen.domain, seen.dataset):
            yield seen


class Candidates:
    """Takes all rollouts and keeps up to `per_step` of every step, which are those that `best` prefers."""

    def __init__(self, per_step: int = PER_STEP):
        self._per_step = per_step
        self._by_step: dict[int | None, list[SeenRollout]] = defaultdict(list)
        self.seen = 0

    def add(self, rollouts: Iterable[SeenRollout]) -> None:
        for rollout in rollouts:
            self.seen += 1
            own = self._by_step[rollout.dispatched_version if rollout.is_test else rollout.step]
            own.append(rollout)
            if len(own) > 2 * self._per_step:
                own[:] = best(own, self._per_step)

    def in_turn(self) -> Iterator[SeenRollout]:
        """Yield the rollouts of the last step, of the first, of the one between them, and so on."""
        steps = sorted(step for step in self._by_step if step is not None)
        for step in [*spread(steps), *([None] if None in self._by_step else [])]:
            yield from best(self._by_step[step], self._per_step)


def best(rollouts: Sequence[SeenRollout], count: int) -> list[SeenRollout]:
    """Choose at most ``count`` rollouts: flagged ones (at most half), then scored by the trainer, then others."""
    flagged = [rollout for rollout in rollouts if rollout.flags][: count // 2]
    left = {rollout.sample_id: rollout for rollout in rollouts if rollout not in flagged}
    found = list(flagged)
    for scored in (True, False):
        own = [name for name, rollout in left.items() if bool(rollout.scores) is scored]
        keep = chosen(own, count - len(found))  # attempts of one problem stay together
        found += [left[name] for name in own if name in keep]
    return found


def spread(steps: Sequence[int]) -> list[int]:
    """Order the steps so that any beginning of the list covers the run evenly."""
    if len(steps) < 3:
        return list(reversed(steps))
    ordered, halves = [steps[-1], steps[0]], [(0, len(steps) - 1)]
    for low, high in halves:
        middle = (low + high) // 2
        if middle not in (low, high):
            ordered.append(steps[middle])
            halves += [(low, middle), (middle, high)]
    return ordered
