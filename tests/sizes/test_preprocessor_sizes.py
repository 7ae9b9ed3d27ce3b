"""Streams and preprocessor at the sizes of real runs: from published groups to micro-batches."""

import time
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.config.rules import check_rules
from pipelinerl.errors import ConfigError, RecordTooLarge
from pipelinerl.preprocess.batching import BatchCutter
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.loop import Preprocessor
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import ActorRecord, MicroBatch, PreprocessorProgress, RolloutGroup, topics
from pipelinerl.records.check import check_micro_batch
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from pipelinerl.streams.files.backend import FilesBackend
from tests.sizes.kit import PROMPT, SIZES, VOCAB, preprocessor_context, sized_group, write_groups

FAST = [(1, 64), (8000, 8), (32_000, 1)]
sizes = pytest.mark.parametrize(
    ("length", "attempts"), [pytest.param(*size, marks=[] if size in FAST else pytest.mark.slow) for size in SIZES]
)


@pytest.fixture(autouse=True)
def files() -> None:
    set_streams_backend("files")


def preprocess(run_dir: Path, rollouts: int, *overrides: str, ranks: int = 1, deadline_s: float = 200.0) -> None:
    role = Preprocessor(preprocessor_context(run_dir, *overrides, ranks=ranks))
    deadline = time.monotonic() + deadline_s
    try:
        while (done := role.totals.samples_packed + role.totals.dropped.total()) < rollouts:
            assert time.monotonic() < deadline, f"{done} of {rollouts} rollouts at the deadline"
            role.turn()
    finally:
        role.close()


def read(run_dir: Path, topic: str, kind: object, partition: int = 0) -> list:
    with open_reader(SingleStreamSpec(run_dir, topic, 0, partition), kind, name=None, start=0) as reader:
        return [record for _, record in reader.read_all()]


@sizes
def test_groups_of_any_size_are_packed_whole(tmp_path: Path, length: int, attempts: int) -> None:
    """Two groups, two steps, two ranks; every trained token arrives once."""
    write_groups(tmp_path, [sized_group(i, attempts, length) for i in range(2)])
    overrides = [f"attempts={attempts}", f"finetune.gradient_accumulation_passes={attempts}"]
    preprocess(tmp_path, 2 * attempts, *overrides, "finetune.seq_length=33000", ranks=2)
    batches = [b for rank in range(2) for b in read(tmp_path, topics.TRAINING_DATA, MicroBatch, rank)]
    for batch in batches:
        check_micro_batch(batch, vocab_size=VOCAB)
        assert len(batch.token_ids) <= 33_000
    packed = sorted(name for b in batches for name in b.sequence_ids if name != "sentinel")
    assert packed == sorted(f"0-{i}/{a}/0" for i in range(2) for a in range(attempts))
    assert sum(int((b.spans[:, 1] - b.spans[:, 0]).sum()) for b in batches) == 2 * attempts * length


@pytest.mark.parametrize("texts", [200])
def test_rollouts_of_two_hundred_texts_are_trained_in_one_step(tmp_path: Path, texts: int) -> None:
    write_groups(tmp_path, [sized_group(0, 4, 50, texts=texts, prompt=400)])
    preprocess(tmp_path, 4, "attempts=4", "finetune.gradient_accumulation_passes=4", "finetune.seq_length=8192")
    batches = read(tmp_path, topics.TRAINING_DATA, MicroBatch)
    assert {batch.step for batch in batches} == {0}
    assert sum(len(batch.sequence_ids) for batch in batches) == 4 * texts


def test_rollout_longer_than_a_micro_batch_is_dropped_and_counted(tmp_path: Path) -> None:
    write_groups(tmp_path, [sized_group(0, 4, 9000), sized_group(1, 4, 50)])
    preprocess(tmp_path, 8, "attempts=4", "finetune.gradient_accumulation_passes=4", "finetune.seq_length=8192")
    progress = read(tmp_path, topics.PREPROCESSOR, PreprocessorProgress)[-1]
    assert (progress.dropped_by_reason, progress.samples_packed) == ({"too_long": 4}, 4)


def test_rollout_that_lived_through_two_thousand_versions_is_packed_with_each() -> None:
    group = sized_group(0, 4, 32_000, spans=2000)
    cutter = BatchCutter(step=2000, batch_size=4, max_lag_steps=None)
    for sample in prepare_group(0, group, Shaping(advantage="loo", seq_length=33_000)):
        assert cutter.offer(sample) is None
    batch = cutter.next_batch()
    assert batch is not None
    (micro_batches,) = collate(batch, Collation(data_parallel_size=1, seq_length=33_000))
    for micro_batch in micro_batches:
        np.testing.assert_array_equal(micro_batch.spans, group.rollouts[0].sequences[0].spans)


@pytest.mark.parametrize("megabytes", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_group_of_many_megabytes_travels_whole(tmp_path: Path, megabytes: int) -> None:
    group = sized_group(0, 64, megabytes * 2**20 // (64 * 8))
    write_groups(tmp_path, [group])
    (arrived,) = read(tmp_path, topics.ACTOR, ActorRecord)
    assert isinstance(arrived, RolloutGroup)
    for sent, received in zip(group.rollouts, arrived.rollouts, strict=True):
        np.testing.assert_array_equal(received.sequences[0].token_ids, sent.sequences[0].token_ids)


def test_group_larger_than_a_record_may_be_is_refused_with_its_size_and_the_key(tmp_path: Path) -> None:
    set_streams_backend(FilesBackend(max_record_mb=1))
    with pytest.raises(RecordTooLarge, match=r"has 2\d{6} bytes, but streams\.max_record_mb is 1: raise it"):
        write_groups(tmp_path, [sized_group(0, 8, 32_000)])


def test_micro_batch_that_no_record_can_hold_is_refused_before_anything_starts(tmp_path: Path) -> None:
    message = r"`streams\.max_record_mb` is 1 but .*`finetune\.seq_length`=70000 tokens takes 8\.5 MB"
    context = preprocessor_context(tmp_path, "finetune.seq_length=70000", "streams.max_record_mb=1")
    with pytest.raises(ConfigError, match=message):
        check_rules(context.cfg)


@pytest.mark.parametrize("groups", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_stream_of_many_groups_is_packed_and_deleted_behind_its_reader(tmp_path: Path, groups: int) -> None:
    write_groups(tmp_path, (sized_group(i, 2, 4, version=0) for i in range(groups)))
    overrides = ["attempts=2", "finetune.gradient_accumulation_passes=100", "finetune.seq_length=2048"]
    preprocess(tmp_path, 2 * groups, *overrides, "max_lag_steps=null", deadline_s=500)
    progress = read(tmp_path, topics.PREPROCESSOR, PreprocessorProgress)
    assert progress[-1].samples_packed == 2 * groups
    assert [p.step for p in progress if p.packed_sample_ids] == list(range(1, groups // 50 + 1))


@pytest.mark.parametrize(("share", "lengths"), [("off", [30_100] * 4), ("auto", [120_400])])
def test_prompts_of_thirty_thousand_tokens_are_packed(tmp_path: Path, share: str, lengths: list[int]) -> None:
    """One micro-batch computes 30,000 tokens once, and 4 × 100."""
    write_groups(tmp_path, [sized_group(0, 4, 100, prompt=30_000)])
    sizes = ["attempts=4", "finetune.gradient_accumulation_passes=4", "finetune.seq_length=31000"]
    preprocess(tmp_path, 4, *sizes, f"finetune.share_prefixes={share}")
    batches = read(tmp_path, topics.TRAINING_DATA, MicroBatch)
    assert [len(batch.token_ids) for batch in batches] == lengths
    assert PROMPT < 30_000
