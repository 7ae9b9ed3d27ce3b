"""The archive: which rollouts stay, how the files stay within their bound, what a killed writer leaves behind."""

import logging
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.observability.archive import StepArchive, StepFile, chosen, flags_of, read_archive, sizes_in, surplus
from pipelinerl.records import Rollout, ScoredSequence, ScoredStep, TrainingSequence

TOKENS = 100


def rollout(reward: float, *, success: float = 1.0, tokens: int = 3) -> Rollout:
    sequence = TrainingSequence(
        token_ids=np.zeros(tokens + 1, np.int32),
        logprobs=np.zeros(tokens, np.float32),
        spans=np.array([[1, tokens + 1, 0]], np.int32),
        finish_reason="stop",
    )
    metrics = {"success": success}
    return Rollout(attempt=0, reward=reward, sequences=(sequence,), metrics=metrics, latency_s=0.0, num_llm_calls=1)


def step(number: int, *names: str) -> ScoredStep:
    values = {"logprobs": np.zeros(TOKENS, np.float32), "entropy": np.zeros(TOKENS, np.float16)}
    sequences = (ScoredSequence(sequence_id=name, altered=np.zeros(TOKENS, bool), **values) for name in names)
    return ScoredStep(step=number, sequences=tuple(sequences))


def archive(folder: Path, **limits: int) -> StepArchive[ScoredStep]:
    return StepArchive(folder, ScoredStep, **({"max_bytes": 10**6, "last_steps": 2, "per_step": 4} | limits))


def test_chosen_keeps_groups_together_and_is_the_same_choice_from_any_part() -> None:
    names = [f"0-{group}/{attempt}" for group in range(20) for attempt in range(8)]
    whole = chosen(names, 16)
    groups = {name.split("/")[0] for name in whole}
    assert len(whole) == 16
    assert len(groups) == 2
    assert whole == {f"{group}/{attempt}" for group in groups for attempt in range(8)}
    part = names[::3]
    assert whole & set(part) <= chosen(part, 16)
    assert chosen(reversed(names), 16) == whole


def test_flags_of_drops_rewarded_failures_and_the_longest() -> None:
    seen = [
        (rollout(1.0), "trained"),
        (rollout(1.5, success=0.0), "trained"),
        (rollout(0.5, success=0.0), "trained"),
        (rollout(0.0, success=0.0, tokens=9), "lag"),
        (rollout(0.0, success=0.0), "zero_advantage"),
    ]
    assert flags_of(seen) == [(), ("reward_without_success",), (), ("lag", "longest"), ()]
    assert flags_of([(rollout(2.0, success=0.0), "trained")]) == [("longest",)]
    assert flags_of([]) == []


def test_write_keeps_all_of_the_last_steps_and_the_chosen_of_every_step(tmp_path: Path) -> None:
    writer = archive(tmp_path / "archive" / "finetune_0.rank0")
    for number in range(5):
        writer.write(number, kept=step(number, "0-0/0/0"), rest=step(number, "0-1/0/0", "0-1/1/0"))
    found = {
        number: sum(len(record.sequences) for record in records)
        for number, _, records in read_archive(tmp_path, "finetune", ScoredStep)
    }
    assert found == {0: 1, 1: 1, 2: 1, 3: 3, 4: 3}
    writer = archive(tmp_path / "archive" / "finetune_0.rank0")  # resumed from step 3: the step comes a second time
    writer.write(3, kept=step(3, "0-5/0/0"), rest=step(3))
    (_, _, records), *_ = [entry for entry in read_archive(tmp_path, "finetune", ScoredStep) if entry[0] == 3]
    assert [sequence.sequence_id for record in records for sequence in record.sequences] == ["0-5/0/0"]


def test_write_many_steps_stays_within_its_bound_and_spans_the_run(tmp_path: Path) -> None:
    writer = archive(tmp_path, max_bytes=20_000)
    for number in range(400):
        writer.write(number, kept=step(number, "0-0/0/0"), rest=step(number, "0-1/0/0"))
        assert sum(sizes_in(tmp_path).values()) <= 20_000
    kept = sorted(file.step for file in sizes_in(tmp_path) if file.part == "kept")
    assert kept[0] == 0
    assert kept[-1] == 399
    assert max(np.diff(kept)) <= 4 * 400 / len(kept), "an even picture of the run"


def test_surplus_gives_up_rests_first_then_the_least_missed_step() -> None:
    sizes = {StepFile(number, part): 10 for number in range(4) for part in ("kept", "rest")}
    assert surplus(sizes, 3, last_steps=4, max_bytes=80) == []
    assert surplus(sizes, 3, last_steps=2, max_bytes=80) == [StepFile(0, "rest"), StepFile(1, "rest")]
    assert surplus(sizes, 3, last_steps=4, max_bytes=65) == [StepFile(0, "rest"), StepFile(1, "rest")]
    uneven = {StepFile(number, "kept"): 10 for number in (0, 8, 10, 12, 20)}
    assert surplus(uneven, 20, last_steps=1, max_bytes=40) == [StepFile(10, "kept")]
    assert surplus({StepFile(7, "kept"): 99}, 7, last_steps=1, max_bytes=1) == [], "the newest step stays"


def test_read_archive_leaves_out_what_a_power_cut_emptied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "archive" / "finetune_0.rank0"
    writer = archive(folder)
    writer.write(0, kept=step(0, "0-0/0/0"), rest=step(0))
    writer.write(1, kept=step(1, "0-0/0/0"), rest=step(1))
    (folder / StepFile(1, "kept").name).write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        found = [(number, len(records)) for number, _, records in read_archive(tmp_path, "finetune", ScoredStep)]
    assert found == [(0, 2), (1, 1)]
    assert "step_00000001.kept" in caplog.text


def test_write_to_a_place_that_cannot_be_written_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    writer = archive(tmp_path / "file" / "archive")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            writer.write(number, kept=step(number), rest=step(number))
    assert len(caplog.records) == 1
