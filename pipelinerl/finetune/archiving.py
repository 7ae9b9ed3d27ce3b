"""Archives the trainer's log-probabilities, entropies and altered tokens of each step.

Values stay on the device until the step's metrics are read. With `finetune.seq_parallel` nothing is archived, because
a rank then has only a slice of each sequence. Shapes: K trained tokens of one micro-batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelinerl.finetune.data import index_tokens
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.archive import StepArchive, chosen, open_archive
from pipelinerl.records import MicroBatch, ScoredSequence, ScoredStep

SCORES_SHARE = 1 / 3
"""The trainer's share of the archive's space. The preprocessor has the rest."""
LARGEST_RATIOS = 2
"""Sequences with the largest log-ratios of a step that are kept in addition to the chosen samples."""


class _DeviceScores(NamedTuple):
    """Values of one micro-batch, on the device."""

    record: MicroBatch
    values: Tensor
    """float32 [3, K]: log-probability, entropy, altered."""


class ScoreArchive:
    """Collects the micro-batches of a step, then archives them."""

    def __init__(self, archive: StepArchive[ScoredStep] | None):
        """``archive``: None keeps nothing."""
        self._archive = archive
        self._scores: list[_DeviceScores] = []

    def add(self, record: MicroBatch, output: PolicyOutput, altered_K: Tensor) -> None:
        """Add a trained micro-batch. ``altered_K``: the tokens on which the clip or a correction acts."""
        if self._archive is not None:
            values = torch.stack([output.logprobs_K.detach().float(), output.entropy_K.detach().float(), altered_K])
            self._scores.append(_DeviceScores(record, values))

    def write(self, step: int) -> None:
        """Archive the micro-batches that were added since the last call."""
        scores, self._scores = self._scores, []
        if self._archive is None:
            return
        sequences = [found for score in scores for found in _sequences(score.record, score.values.cpu().numpy())]
        keep = chosen((_sample_of(sequence) for sequence, _ in sequences), self._archive.per_step)
        kept, rest = split_sequences(sequences, keep)
        self._archive.write(
            step, kept=ScoredStep(step=step, sequences=kept), rest=ScoredStep(step=step, sequences=rest)
        )


def open_scores(ctx: RoleContext, rank: int, world_size: int) -> ScoreArchive:
    """The archive of this rank, which keeps nothing with `finetune.seq_parallel`."""
    if ctx.cfg.finetune.seq_parallel > 1:
        return ScoreArchive(None)
    name = f"{ctx.job.name}.rank{rank}"
    return ScoreArchive(open_archive(ctx.cfg.archive, ctx.run_dir, name, ScoredStep, share=SCORES_SHARE / world_size))


def split_sequences(
    sequences: Sequence[tuple[ScoredSequence, float]], keep: set[str]
) -> tuple[tuple[ScoredSequence, ...], tuple[ScoredSequence, ...]]:
    """Divide sequences, each with its largest absolute log-ratio, into those to keep and the rest.

    The ``LARGEST_RATIOS`` largest are kept, and those of the sample ids in ``keep``.
    """
    largest = sorted(range(len(sequences)), key=lambda i: -sequences[i][1])[:LARGEST_RATIOS]
    kept: list[ScoredSequence] = []
    rest: list[ScoredSequence] = []
    for index, (sequence, _) in enumerate(sequences):
        (kept if index in largest or _sample_of(sequence) in keep else rest).append(sequence)
    return tuple(kept), tuple(rest)


def _sample_of(sequence: ScoredSequence) -> str:
    return sequence.sequence_id.rpartition("/")[0]


def _sequences(record: MicroBatch, values: np.ndarray) -> list[tuple[ScoredSequence, float]]:
    """Every sequence of a micro-batch that has trained tokens, with its largest absolute log-ratio."""
    index = index_tokens(record)
    starts = np.flatnonzero(np.diff(index.segments_K, prepend=-1))
    found = []
    for start, end in zip(starts, [*starts[1:], len(index.segments_K)], strict=True):
        logprobs, entropy, altered = values[:, start:end]
        sequence = ScoredSequence(
            sequence_id=record.sequence_ids[index.segments_K[start]],
            logprobs=logprobs,
            entropy=entropy.astype(np.float16),
            altered=altered > 0,
        )
        found.append((sequence, float(np.abs(logprobs - record.logprobs[index.positions_K[start:end]]).max())))
    return found
