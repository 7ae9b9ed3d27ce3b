"""The trainer's part of the archive: its numbers by sequence, from a micro-batch with a gap in its trained tokens."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.finetune.archiving import SCORES_SHARE, ScoreArchive, split_sequences
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.observability.archive import StepArchive, read_archive
from pipelinerl.preprocess.loop import ROLLOUTS_SHARE
from pipelinerl.records import MicroBatch, ScoredSequence, ScoredStep


def micro_batch() -> MicroBatch:
    """Segments of 4, 3 and 2 tokens; the second trains nothing, the first has two spans with a gap."""
    return MicroBatch(
        step=5,
        index=0,
        count=1,
        token_ids=np.arange(9, dtype=np.int32),
        segment_lengths=np.array([4, 3, 2], np.int32),
        segment_weights=np.ones(3, np.float32),
        spans=np.array([[1, 2, 4], [3, 4, 5], [8, 9, 5]], np.int32),
        logprobs=np.array([0, -1.0, 0, -2.0, 0, 0, 0, 0, -3.0], np.float32),
        advantages=np.zeros(9, np.float32),
        ref_logprobs=None,
        num_samples=2,
        num_tokens=3,
        sequence_ids=("0-0/0/0", "0-0/0/1", "0-1/2/0"),
        rewards=np.zeros(3, np.float32),
        next_source=(0, 0),
    )


def output() -> PolicyOutput:
    zeros = torch.zeros(3)
    return PolicyOutput(
        loss=torch.zeros(()),
        logprobs_K=torch.tensor([-1.5, -2.0, -3.25], requires_grad=True),
        entropy_K=torch.tensor([0.5, 0.25, 1.0]),
        value_loss=torch.zeros(()),
        inputs=TokenInputs(
            sampler_logprobs_K=zeros,
            advantages_K=zeros,
            weights_K=zeros,
            segments_K=torch.tensor([0, 0, 2]),
            num_segments=3,
        ),
    )


def test_write_gives_every_sequence_its_own_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "archive" / "finetune_0.rank0"
    scores = ScoreArchive(StepArchive(folder, ScoredStep, max_bytes=10**6, last_steps=1, per_step=1))
    scores.add(micro_batch(), output(), torch.tensor([False, True, False]))
    scores.write(5)
    ((step, job, records),) = read_archive(tmp_path, "finetune", ScoredStep)
    assert (step, job) == (5, "finetune_0.rank0")
    found = {sequence.sequence_id: sequence for record in records for sequence in record.sequences}
    assert sorted(found) == ["0-0/0/0", "0-1/2/0"]
    np.testing.assert_array_equal(found["0-0/0/0"].logprobs, np.array([-1.5, -2.0], np.float32))
    np.testing.assert_array_equal(found["0-0/0/0"].entropy, np.array([0.5, 0.25], np.float16))
    assert found["0-0/0/0"].altered.tolist() == [False, True]
    assert found["0-1/2/0"].logprobs.tolist() == [-3.25]


def test_write_without_an_archive_leaves_no_file(tmp_path: Path) -> None:
    scores = ScoreArchive(None)
    scores.add(micro_batch(), output(), torch.tensor([False, True, False]))
    scores.write(5)
    assert list(tmp_path.iterdir()) == []


def test_two_sequences_with_the_largest_ratios_are_kept_beside_the_chosen_samples() -> None:
    sequences = [
        (ScoredSequence(sequence_id=f"0-0/{attempt}/0", logprobs=none, entropy=none, altered=none > 0), ratio)
        for attempt, ratio in enumerate((0.1, 0.4, 0.2, 0.3))
        for none in [np.zeros(0, np.float32)]
    ]
    kept, rest = split_sequences(sequences, {"0-0/0"})
    assert [one.sequence_id for one in kept] == ["0-0/0/0", "0-0/1/0", "0-0/3/0"]
    assert [one.sequence_id for one in rest] == ["0-0/2/0"]


def test_preprocessors_and_ranks_share_the_archive_and_no_more() -> None:
    assert sum([ROLLOUTS_SHARE, SCORES_SHARE]) == pytest.approx(1.0)
