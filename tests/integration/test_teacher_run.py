"""Runs that learn from a teacher alone, frozen or an average of the policy, whose server is killed in mid-run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.tiny_model import build
from tests.waiting import wait_until

TIMEOUT_S = 900
STEPS, TOP = 30, 4
AVERAGED_STEPS = 60


def server_pid(run_dir: Path) -> int | None:
    """The teacher's server, by its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"preprocessor_llm_0" in words and str(run_dir).encode() in words:
            return int(folder.name)
    return None


def run_with_killed_teacher(run_dir: Path, *own: str, kill_at: int) -> str:
    """A quickstart whose teacher's server is killed after ``kill_at`` steps. Returns what the launcher printed."""
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
    three_slots = ("world.cpu_slots=3", "world.preprocessor_fraction=1")
    launcher = subprocess.Popen(
        [*command, *three_slots, *own], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until(
            lambda: launcher.poll() is not None or len(list(read_metrics(run_dir, "finetune"))) >= kill_at, TIMEOUT_S
        )
        killed = server_pid(run_dir)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        output, _ = launcher.communicate(timeout=TIMEOUT_S)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    assert "preprocessor_llm_0 1" in output, "the teacher was restarted once"
    assert read_ledger(run_dir).violations == ()
    return output


def batches_of(run_dir: Path) -> list[MicroBatch]:
    with open_reader(SingleStreamSpec(run_dir, "training_data"), MicroBatch, name=None) as reader:
        return [batch for _, batch in reader.read_all()]


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_teacher_that_is_killed_in_mid_run_is_restarted_and_scores_on(tmp_path: Path) -> None:
    for name, seed in (("student", 0), ("teacher", 0)):
        build(tmp_path / name, "largest", seed, {"max_number": 30, "steps": 300 if name == "student" else 600})
    run_dir = tmp_path / "run"
    run_with_killed_teacher(
        run_dir,
        f"model_path={tmp_path / 'student'}",
        "tiny_model=null",
        f"teachers=[{{model_path: {tmp_path / 'teacher'}}}]",
        *("finetune.rl.teacher_coef=1", f"finetune.rl.teacher_top_k={TOP}", "finetune.rl.reward_coef=0"),
        *(f"finetune.max_train_steps={STEPS}", "attempts=2", "eval.at_start=false", "eval.at_end=false"),
        kill_at=5,
    )
    points = list(read_metrics(run_dir, "finetune"))
    assert [point["step"] for point in points] == list(range(1, STEPS + 1))
    assert all(point["teacher_gap"] > 10 * point["teacher_noise"] > 0 for point in points), "float32 at both ends"
    batches = batches_of(run_dir)
    assert batches
    for batch in batches:
        assert batch.teacher_logprobs is not None
        for start, end, _ in batch.spans.tolist():
            assert np.isfinite(batch.teacher_logprobs[start:end]).all()
            assert (batch.teacher_logprobs[start:end] < 0).all()
        assert batch.teacher_top_logprobs is not None
        assert batch.teacher_top_logprobs.shape[1] == TOP
        assert (np.diff(batch.teacher_top_logprobs, axis=1) <= 0).all()
        assert (np.exp(batch.teacher_top_logprobs).sum(1) <= 1 + 1e-5).all()


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_policy_learns_from_its_own_average_that_sees_a_hint_though_its_server_is_killed(tmp_path: Path) -> None:
    """No reward is learned from: only what the average would answer that sees the largest number once more."""
    run_dir = tmp_path / "run"
    run_with_killed_teacher(
        run_dir,
        "dataset_loader=tests.largest_tasks.load_shown",
        "teachers=[{ema: 0.99, hint: true}]",
        *("finetune.rl.teacher_coef=1", "finetune.rl.reward_coef=0", "finetune.rl.teacher_top_k=8", "attempts=1"),
        *(f"finetune.max_train_steps={AVERAGED_STEPS}", "finetune.save_checkpoint_steps=10"),
        kill_at=25,
    )
    log = (run_dir / "preprocessor_llm_0" / "log.txt").read_text()
    assert log.count("event=average_begins version=0") == 1
    assert log.count("event=average_begins") == 1, "the average was lost"
    assert log.count("event=average_read") == 1
    points = list(read_metrics(run_dir, "actor"))
    successes = [point["eval/success"] for point in points if "eval/success" in point]
    assert successes[-1] >= successes[0] + 0.3, successes
    for batch in batches_of(run_dir):
        assert batch.teacher_versions is not None
        for start, end, _ in batch.spans.tolist():
            assert (batch.teacher_versions[start:end] >= 0).all()
            assert (batch.teacher_versions[start:end] <= batch.step).all()
