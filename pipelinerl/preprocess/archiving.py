"""Archives the preprocessor's rollouts with their outcomes, step by step, for people to read."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelinerl.observability.archive import StepArchive, chosen, flags_of
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import ArchivedRollout, ArchivedStep, RolloutGroup
from pipelinerl.records.archive import TRAINED
from pipelinerl.records.drops import DropReason


@dataclass
class RolloutArchive:
    """Collects the outcomes of rollouts until their batch is published."""

    archive: StepArchive[ArchivedStep] | None
    """None keeps nothing."""
    _decided: list[tuple[Sample, str]] = field(default_factory=list)

    def add(self, sample: Sample, drop_reason: DropReason | None) -> None:
        """Add a decided rollout. ``drop_reason`` None: it is trained."""
        if self.archive is not None:
            self._decided.append((sample, drop_reason or TRAINED))

    def write(self, step: int) -> None:
        """Archive the rollouts that were decided since the last call."""
        if self.archive is not None:
            kept, rest = split_rollouts(self._decided, self.archive.per_step)
            self.archive.write(
                step, kept=ArchivedStep(step=step, rollouts=kept), rest=ArchivedStep(step=step, rollouts=rest)
            )
        self._decided = []


def split_rollouts(
    decided: Sequence[tuple[Sample, str]], count: int
) -> tuple[tuple[ArchivedRollout, ...], tuple[ArchivedRollout, ...]]:
    """Divide rollouts with their outcomes into those to keep (``count`` chosen, and all flagged) and the rest."""
    rollouts = [(_group(sample).rollouts[sample.source[1]], outcome) for sample, outcome in decided]
    flags = flags_of(rollouts)
    keep = chosen((sample.sample_id for sample, outcome in decided if outcome == TRAINED), count)
    kept: list[ArchivedRollout] = []
    rest: list[ArchivedRollout] = []
    for (sample, outcome), own in zip(decided, flags, strict=True):
        (kept if own or sample.sample_id in keep else rest).append(archived(sample, outcome, own))
    return tuple(kept), tuple(rest)


def archived(sample: Sample, outcome: str, flags: tuple[str, ...]) -> ArchivedRollout:
    """The archive's record of a rollout. ``outcome``: `trained` or the reason of the drop."""
    group = _group(sample)
    rollout = group.rollouts[sample.source[1]]
    advantages = {index: a for (index, _), a in zip(sample.sequences, sample.advantages, strict=True)}
    return ArchivedRollout(
        group_id=group.group_id,
        domain=group.domain,
        dataset=group.dataset,
        problem=group.problem,
        dispatched_version=group.dispatched_version,
        rollout=rollout,
        outcome=outcome,
        advantages=tuple(advantages.get(index) for index in range(len(rollout.sequences))),
        flags=flags,
    )


def _group(sample: Sample) -> RolloutGroup:
    assert sample.group is not None, "the reader gives every sample its group"
    return sample.group
