"""The figures of `summary.json`, from records made by hand."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.inspect import report
from pipelinerl.launcher.terminal import evaluation_line, step_line
from pipelinerl.observability.status import StatusRecord
from pipelinerl.records import (
    EvaluationDone,
    Rollout,
    RolloutGroup,
    SamplesProcessed,
    TrainingDone,
    TrainingResumed,
    TrainingSequence,
    WeightUpdateSuccess,
)
from tests.says import says


def sequence(*spans: tuple[int, int, int]) -> TrainingSequence:
    trained = sum(end - start for start, end, _ in spans)
    return TrainingSequence(
        token_ids=np.zeros(spans[-1][1], dtype=np.int32),
        logprobs=np.zeros(trained, dtype=np.float32),
        spans=np.array(spans, dtype=np.int32),
        finish_reason="stop",
    )


def group(*rollouts: tuple[TrainingSequence, ...]) -> RolloutGroup:
    return RolloutGroup(
        group_id="0-0",
        epoch=0,
        position=0,
        problem_index=0,
        actor=0,
        domain="d",
        dataset="train",
        attempts=len(rollouts),
        rollouts=tuple(
            Rollout(attempt=i, reward=0.0, sequences=sequences, metrics={}, latency_s=1.0, num_llm_calls=1)
            for i, sequences in enumerate(rollouts)
        ),
        dispatched_version=0,
        settled_before=0,
        dispatch_index=0,
    )


def processed(step: int, at: float, **metrics: float) -> SamplesProcessed:
    return SamplesProcessed(samples_processed=64 * step, step=step, metrics=metrics, timestamp=at)


def evaluation(version: int, success: float) -> EvaluationDone:
    return EvaluationDone(version=version, success=success, reward=2 * success, num_rollouts=8, metrics={})


@pytest.fixture
def records() -> report.RunRecords:
    totals = report.RolloutTotals()
    totals.add(group((sequence((2, 5, 0), (5, 6, 1), (6, 9, 2)),), (sequence((0, 4, 1)), sequence((3, 5, 1)))))
    return report.RunRecords(
        trainer=[
            WeightUpdateSuccess(version=0, servers=("s",), pause_ms=(500.0,), timestamp=100.0),
            WeightUpdateSuccess(version=1, servers=("s",), pause_ms=(10.0, 20.0), timestamp=101.0),
            processed(1, 101.0, lag_mean=1.0, lag_max=2.0, tokens=100.0, reward=0.1),
            processed(1, 103.0, lag_mean=2.0, lag_max=3.0, tokens=100.0, reward=0.1),
            WeightUpdateSuccess(version=2, servers=("s",), pause_ms=(40.0,), timestamp=104.0),
            processed(2, 105.0, lag_mean=1.0, lag_max=1.0, tokens=300.0, reward=0.2),
            TrainingDone(step=2),
        ],
        evaluations=[evaluation(2, 0.9), evaluation(0, 0.3)],
        rollouts=totals,
    )


def test_summarise_figures_by_hand(records: report.RunRecords) -> None:
    summary = report.summarise(records, [{"aborted_requests": 1}, {"aborted_requests": 2}, {}], wall_s=9.0, seed=7)
    assert (summary["success_before"], summary["success_after"]) == (0.3, 0.9)
    assert (summary["optimizer_steps"], summary["rollouts_trained"]) == (2, 128)
    assert summary["weight_updates"] == 2
    assert summary["pause_ms"] == {"median": 20.0, "mean": pytest.approx(70 / 3), "max": 40.0}
    assert summary["lag_steps"] == {"mean": pytest.approx((2 * 100 + 1 * 300) / 400), "max": 3.0}
    assert summary["rollouts"] == 2
    assert (summary["versions_in_one_rollout_median"], summary["versions_in_one_rollout_max"]) == (1, 3)
    assert summary["tokens_in_one_rollout"] == {"median": 6, "p99": 7}
    assert summary["training_s"] == 5.0
    assert summary["tokens_generated_per_s"] == pytest.approx((7 + 4 + 2) / 5)
    assert summary["tokens_trained_per_s"] == pytest.approx(400 / 5)
    assert (summary["aborted_requests"], summary["wall_s"], summary["seed"]) == (2, 9.0, 7)
    json.dumps(summary)


def test_summarise_training_of_a_resumed_run_is_that_of_its_processes(records: report.RunRecords) -> None:
    """5 s before, then from 1,000 to 1,003 with an evaluation of the loaded version until 1,001."""
    resumed = TrainingResumed(step=2, repeated=0, samples_processed=128)
    again = WeightUpdateSuccess(version=2, servers=("s",), timestamp=1000.0)
    records.trainer += [resumed, again, processed(3, 1003.0, tokens=50.0)]
    assert report.summarise(records, [], wall_s=20.0, seed=0)["training_s"] == 8.0
    records.evaluations.append(msgspec.structs.replace(evaluation(2, 0.9), timestamp=1001.0))
    summary = report.summarise(records, [], wall_s=4.0, seed=0)
    assert (summary["training_s"], summary["wall_s"]) == (7.0, 7.0), "the first launch was killed and has no summary"


def test_summarise_groups_that_were_deleted_are_counted_by_the_actor(records: report.RunRecords) -> None:
    records.rollouts.is_complete = False
    summary = report.summarise(records, [{"samples_published": 120}], wall_s=9.0, seed=7)
    assert (summary["rollouts"], summary["rollouts_per_s"]) == (120, 24.0)
    assert (summary["tokens_generated_per_s"], summary["versions_in_one_rollout_max"]) == (None, None)
    restarted = [
        {"versions_in_one_rollout_max": 4, "tokens_generated": 600},
        {"versions_in_one_rollout_max": 2, "tokens_generated": 500},
    ]
    told = report.summarise(records, restarted, wall_s=9.0, seed=7)
    assert (told["tokens_generated_per_s"], told["versions_in_one_rollout_max"]) == (100.0, 4)
    lines = report.summary_lines(summary, Path("run"))
    assert any(re.match(says("rollouts", 120, "24 per second"), line) for line in lines)
    slow = report.summary_lines({**summary, "rollouts_per_s": 0.264}, Path("run"))
    assert any("120, 0.26 per second" in line for line in slow)


def test_summarise_nothing_known_is_none_not_zero() -> None:
    summary = report.summarise(report.RunRecords(), [], wall_s=1.0, seed=0)
    for key in ("success_before", "success_after", "aborted_requests", "tokens_trained_per_s", "training_s"):
        assert summary[key] is None
    assert summary["pause_ms"] == {"median": None, "mean": None, "max": None}
    assert re.match(r"success +– → –", report.summary_lines(summary, Path("run"))[0])


@pytest.mark.parametrize(("percent", "expected"), [(1, 2), (50, 2), (51, 5), (99, 9), (100, 9)])
def test_percentile_of_counts(percent: float, expected: int) -> None:
    assert report.percentile(Counter({9: 1, 2: 2, 5: 1}), percent) == expected


@pytest.mark.parametrize("length", [10, 8_150, 20_000, 200_000])
def test_newest_point_is_read_whatever_its_length_and_a_cut_one_is_left_out(tmp_path: Path, length: int) -> None:
    (tmp_path / "metrics").mkdir()
    file = tmp_path / "metrics" / "actor.jsonl"
    assert report.read_metrics_tail(tmp_path, "actor") is None
    file.write_text('{"step": 1}\n' + json.dumps({"step": 2, "reward": "x" * length}) + '\n{"step": 3, "rew')
    point = report.read_metrics_tail(tmp_path, "actor")
    assert point is not None
    assert point["step"] == 2


def test_draw_learning_curve_writes_a_picture(records: report.RunRecords, tmp_path: Path) -> None:
    report.draw_learning_curve(tmp_path / "curve.png", records)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


SEEN = {"reward": 0.38, "success": 0.55, "prefix_hit_rate": 0.618}


def test_phases_follow_one_another_and_leave_out_what_did_not_happen(records: report.RunRecords) -> None:
    records.evaluations = [
        msgspec.structs.replace(evaluation(0, 0.3), timestamp=100.5),
        msgspec.structs.replace(evaluation(2, 0.9), timestamp=107.0),
    ]
    role = StatusRecord(
        job="a", state="done", pid=1, hostname="h", started=0, heartbeat=0, progress_at=0, progress_count=1, waits=(),
        fields={"ready_s": 9.5},
    )  # fmt: skip
    phases = report.phases_of(records, {"actor_0": role}, launched=90.0, started=93.0, now=108.0)
    assert phases == {
        "checks": 3.0,
        "start": 7.0,
        "first_evaluation": 0.5,
        "training": 4.5,
        "last_evaluation": 2.0,
        "ending": 1.0,
        "ready": {"actor_0": 9.5},
    }
    nothing = report.phases_of(report.RunRecords(), {}, launched=90.0, started=93.0, now=95.0)
    assert nothing == {"checks": 3.0, "ending": 2.0, "ready": {}}


def test_running_mean_is_of_what_came_before() -> None:
    assert report.running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def imitated(step: int, at: float, loss: float, **metrics: float) -> SamplesProcessed:
    own = {"sft_loss": loss, "sequences": 0.0, "tokens": 100.0, "step_s": 2.0, "reward": 0.0, "lag_mean": 0.0}
    return processed(step, at, **own, **metrics)


def imitation_records() -> tuple[report.RunRecords, dict[str, Any]]:
    """Three steps of 4 conversations, the second one twice, of 6 rows. Each takes two seconds."""
    trainer = [imitated(1, 10.0, 2.0), imitated(2, 12.0, 9.0), imitated(2, 12.0, 1.0), imitated(3, 14.0, 0.5)]
    points = [{"step": 0, "sft_test_loss": 2.5}, {"step": 1}, {"step": 3, "sft_test_loss": 0.75}]
    rows = [{"sft_rows": 7, "sft_rows_left_out": 1}, {"sft_rows": 6, "sft_rows_left_out": 2}]
    cfg = parse(compose("base", ["output_dir=x", "stage=sft", "sft.datasets=[x]", *FOUR]))
    records = report.RunRecords(trainer=trainer)
    return records, report.imitation_of(points, rows, report.last_per_step(trainer), cfg)


FOUR = ("finetune.train_batch_size=4", "finetune.gradient_accumulation_passes=1")


def test_run_that_imitates_says_what_it_learned_and_nothing_of_rollouts() -> None:
    records, imitation = imitation_records()
    assert imitation == {
        "loss_first": 2.0,
        "loss_last": 0.5,
        "held_out_first": 2.5,
        "held_out_last": 0.75,
        "rows": 6,
        "rows_left_out": 2,
        "epochs": 2.0,
    }
    summary = report.summarise(records, [], wall_s=9.0, seed=7, imitation=imitation)
    assert summary == {
        "imitation": imitation,
        "optimizer_steps": 3,
        "tokens_trained_per_s": pytest.approx(300 / 6),
        "tokens_shared": None,
        "training_s": 6.0,
        "wall_s": 9.0,
        "phases": {},
        "seed": 7,
    }
    lines = report.summary_lines(summary, Path("run"))
    assert lines[-2:] == [
        "conversations    6 rows imitated 2.0 times, 2 left out",
        "loss             2.000 → 0.500 nats per token, held-out 2.500 → 0.750",
    ]
    assert not any("–" in line for line in lines)
    without = report.summary_lines(summary | {"imitation": imitation | {"held_out_last": None}}, Path("run"))
    assert without[-1] == "loss             2.000 → 0.500 nats per token"


def test_rollouts_with_conversations_beside_them_keep_their_figures(records: report.RunRecords) -> None:
    _, imitation = imitation_records()
    summary = report.summarise(records, [], wall_s=9.0, seed=7, imitation=imitation)
    assert summary["imitation"] == imitation
    assert (summary["success_after"], summary["rollouts_trained"]) == (0.9, 128)
    assert any("2.000 → 0.500" in line for line in report.summary_lines(summary, Path("run")))


def test_draw_learning_curve_of_a_run_that_imitates(tmp_path: Path) -> None:
    records, _ = imitation_records()
    report.draw_learning_curve(tmp_path / "curve.png", records, held_out=[(0, 2.5), (3, 0.75)])
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("test_loss", "told"), [({}, ""), ({"sft_test_loss": 0.75}, "  held-out 0.750")])
def test_step_line_of_conversations_alone_has_their_loss(test_loss: dict[str, float], told: str) -> None:
    line = step_line(imitated(2, 12.0, 1.0, wait_s=0.25, **test_loss), 3, 2.0, None, {})
    assert line == f"step 2/3  loss 1.000 nats per token{told}  50 tok/s  wait 0.25 s"


def test_step_line_says_everything_once() -> None:
    message = processed(12, 5.0, reward=0.414, lag_mean=1.23, lag_max=3.0, tokens=1155.0, wait_s=0.016)
    assert step_line(message, 96, 0.5, 33.6, SEEN) == (
        "step 12/96  reward 0.38  success 0.55  lag 1.2 (max 3)  2,310 tok/s  pause 34 ms  wait 0.02 s"
        "  prefix hits 0.62"
    )
    bare = step_line(processed(1, 0.0), 96, None, None, {})
    assert bare == "step 1/96  reward –  success –  lag – (max –)  – tok/s  pause – ms  wait – s  prefix hits –"


def test_evaluation_line_names_its_version() -> None:
    assert evaluation_line(evaluation(32, 0.5)) == "evaluation of version 32: success 0.500  reward 1.00  (8 rollouts)"
    failed = EvaluationDone(version=4, success=None, reward=None, num_rollouts=0, metrics={})
    assert evaluation_line(evaluation(0, 0.5), "exports/step_160").startswith("evaluation of exports/step_160: success")
    assert re.search(says("evaluation of version 4", "no result"), evaluation_line(failed))
    assert report.before_and_after([evaluation(0, 0.5), failed])["success_after"] is None
    assert report.before_and_after([evaluation(0, 0.5)])["success_after"] is None
    alone = report.before_and_after([evaluation(40, 0.5)])
    assert (alone["success_before"], alone["success_after"]) == (None, 0.5)
