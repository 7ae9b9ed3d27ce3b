"""The preprocessor's conversations: a run that imitates, with and without restarts, and a mix with rollouts."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipelinerl.errors import DomainError
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import MicroBatch, PreprocessorProgress, topics
from pipelinerl.testing import byte_tokenizer
from tests.memory_streams import MemoryBackend
from tests.preprocess_kit import (
    consumed,
    make_context,
    make_group,
    make_world,
    prepare_run,
    preprocessor,
    read_topic,
    turn_until,
    write_groups,
)
from tests.says import says

STEPS = 6


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return new_run(tmp_path, monkeypatch)


def new_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a tokenizer and ten conversations."""
    folder.mkdir(exist_ok=True)
    prepare_run(MemoryBackend(), folder, monkeypatch)
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": chr(97 + i) * (1 + i % 4)}]}
        for i in range(10)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def imitate(run_dir: Path, *stops: int, keys: tuple[str, ...] = ()) -> list[bytes]:
    """Publish all steps, with a restart after each of ``stops``. Returns the micro-batches as bytes."""
    keys = (*keys, "stage=sft", f"sft.datasets=[{run_dir / 'rows.jsonl'}]", f"finetune.max_train_steps={STEPS}")
    for last in (*stops, STEPS):
        with preprocessor(make_context(run_dir, make_world(), *keys)) as role:
            turn_until(role, lambda role=role, last=last: role.totals.step == last)
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    assert sorted({batch.step for batch in batches}) == list(range(STEPS))
    return [repr_of(batch) for batch in batches]


def repr_of(batch: MicroBatch) -> bytes:
    return b"|".join(
        value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()
        for value in msgspec.structs.astuple(batch)
    )


def test_run_that_imitates_and_restarts_publishes_what_one_without_a_stop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = imitate(new_run(tmp_path / "whole", monkeypatch))
    assert imitate(new_run(tmp_path / "stopped", monkeypatch), 2, 5) == whole
    points = list(read_metrics(tmp_path / "whole", "preprocessor"))
    assert [point["samples"] for point in points] == [6] * STEPS
    assert not any("advantage_std" in point or "reward" in point for point in points), "they are of rollouts"


def test_held_out_conversations_are_published_when_their_loss_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start (step 0), after versions 4 (step 3) and 6 (step 5, the last): the other bytes do not change."""
    plain = new_run(tmp_path / "plain", monkeypatch)
    imitate(plain)
    expected = read_topic(plain, topics.TRAINING_DATA, MicroBatch)
    with_tests = new_run(tmp_path / "with_tests", monkeypatch)
    (with_tests / "test.jsonl").write_text((with_tests / "rows.jsonl").read_text().splitlines()[0] + "\n")
    imitate(with_tests, 3, keys=(f"sft.test_datasets=[{with_tests / 'test.jsonl'}]", "eval_every_n_versions=4"))
    found = read_topic(with_tests, topics.TRAINING_DATA, MicroBatch)
    assert [batch.step for batch in found if batch.is_held_out] == [0, 3, 5]
    trained, plain_ones = (
        [repr_of(msgspec.structs.replace(batch, count=1)) for batch in batches if not batch.is_held_out]
        for batches in (found, expected)
    )
    assert trained == plain_ones


def test_rows_without_an_answer_are_left_out_and_counted(run_dir: Path) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    long = [{"role": "user", "content": "q" * 9999}, messages[1]]
    rows = [{"messages": messages[:1]}, {"messages": long}, {"messages": messages}]
    (run_dir / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = ("stage=sft", f"sft.datasets=[{run_dir / 'rows.jsonl'}]", "finetune.gradient_accumulation_passes=1")
    ones = (*keys, "finetune.train_batch_size=1", f"finetune.max_train_steps={STEPS}")
    with (
        pytest.raises(DomainError, match=says("1 of 3 rows", "row 0", "sft.max_left_out")),
        preprocessor(make_context(run_dir, make_world(), *ones)),
    ):
        pass
    with preprocessor(make_context(run_dir, make_world(), *ones, "sft.max_left_out=0.5")) as role:
        turn_until(role, lambda: role.totals.step == STEPS)
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    assert [batch.num_samples for batch in batches] == [1] * STEPS
    point = list(read_metrics(run_dir, "preprocessor"))[-1]
    assert (point["sft_rows"], point["sft_rows_left_out"]) == (1, 2)


def test_conversations_beside_rollouts_change_nothing_that_is_said_about_rollouts(run_dir: Path) -> None:
    write_groups(run_dir, [make_group(np.random.default_rng(i), i, version=0) for i in range(3)])
    keys = (f"sft.datasets=[{run_dir / 'rows.jsonl'}]", "sft.per_step=5", "sft.weight=0.25")
    with preprocessor(make_context(run_dir, make_world(), *keys)) as role:
        turn_until(role, consumed(role, 3))
    batches = read_topic(run_dir, topics.TRAINING_DATA, MicroBatch)
    for step in (0, 1):
        records = [batch for batch in batches if batch.step == step]
        names = [name for batch in records for name in batch.sequence_ids]
        assert {batch.num_samples for batch in records} == {6}
        assert (len(names), sum(name.startswith("sft-") for name in names)) == (11, 5)
        weight = 0.0
        for batch in records:
            for name, imitated, length, start, share in zip(
                batch.sequence_ids,
                np.zeros(len(batch.sequence_ids)) if batch.supervised is None else batch.supervised,
                batch.segment_lengths,
                np.cumsum(batch.segment_lengths) - batch.segment_lengths,
                batch.segment_weights,
                strict=True,
            ):
                assert imitated == name.startswith("sft-")
                if imitated:
                    weight += share * batch.advantages[start : start + length].sum()
        assert weight == pytest.approx(0.25, rel=1e-5)
    packed = [
        record for record in read_topic(run_dir, topics.PREPROCESSOR, PreprocessorProgress) if record.packed_sample_ids
    ]
    assert [record.samples_packed for record in packed] == [6, 12]
    assert not any(name.startswith("sft-") for record in packed for name in record.packed_sample_ids)
