"""Whole runs with `stage: sft`: it learns, a resumed run is bit-equal, and a run on rollouts starts from its export."""

import hashlib
import json
from pathlib import Path
from random import Random

import pytest

from pipelinerl.domains.largest import load_problems
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.tiny_model import build
from tests.launches import run_experiment

TIMEOUT_S = 600
COMMON = ("tiny_model=null", "finetune.num_warmup_steps=0", "finetune.learning_rate=2e-3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model, and solved problems that are not held out."""
    folder = tmp_path_factory.mktemp("sft")
    build(folder / "model", "largest", 0, {"max_number": 30})
    problems = Random(0).sample(load_problems(["train"]), 3000)
    rows = [
        {
            "messages": [
                {"role": "user", "content": problem["question"]},
                {"role": "assistant", "content": f"<answer>{problem['answer']}</answer>"},
            ]
        }
        for problem in problems
    ]
    (folder / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def imitate(folder: Path, name: str, steps: int) -> Path:
    own = ("stage=sft", f"model_path={folder / 'model'}", f"sft.datasets=[{folder / 'solved.jsonl'}]")
    run_experiment("quickstart", folder / name, *COMMON, *own, f"finetune.max_train_steps={steps}", timeout_s=TIMEOUT_S)
    return folder / name


def weights(run: Path, step: int) -> str:
    return hashlib.sha256((run / "exports" / f"step_{step}" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_resumed_run_is_bit_equal_to_one_that_was_not_interrupted(folder: Path) -> None:
    whole = imitate(folder, "whole", 24)
    resumed = imitate(folder, "resumed", 10)
    assert imitate(folder, "resumed", 24) == resumed
    assert weights(resumed, 24) == weights(whole, 24) != weights(resumed, 10)


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_epochs_set_the_steps_and_the_summary_says_what_was_learned(folder: Path) -> None:
    """3,000 rows in steps of 64: half an epoch is 23.4 steps, three quarters are 35.2. Five rows are held out."""
    rows = (folder / "solved.jsonl").read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(rows[:5]) + "\n")
    own = ("stage=sft", f"model_path={folder / 'model'}", f"sft.datasets=[{folder / 'solved.jsonl'}]")
    held_out = (f"sft.test_datasets=[{folder / 'held_out.jsonl'}]", "eval_every_n_versions=0")
    run = folder / "epochs"
    first = run_experiment("quickstart", run, *COMMON, *own, *held_out, "sft.epochs=0.5", timeout_s=TIMEOUT_S)
    last = run_experiment("quickstart", run, *COMMON, *own, *held_out, "sft.epochs=0.75", timeout_s=TIMEOUT_S)
    assert (first["optimizer_steps"], last["optimizer_steps"]) == (24, 36)
    points = list(read_metrics(run, "finetune"))
    losses = [point["sft_loss"] for point in points if point["step"]]
    tests = {point["step"]: point["sft_test_loss"] for point in points if "sft_test_loss" in point}
    assert sorted(tests) == [0, 24, 36]
    imitation = last["imitation"]
    assert (imitation["loss_first"], imitation["loss_last"]) == pytest.approx((losses[0], losses[-1]))
    assert (imitation["held_out_first"], imitation["held_out_last"]) == (tests[0], tests[36])
    assert (imitation["rows"], imitation["rows_left_out"], imitation["epochs"]) == (3000, 0, 36 * 64 / 3000)
    assert tests[36] < tests[24] < tests[0]
    assert last["tokens_trained_per_s"] > 0
    assert "success_before" not in last


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_run_on_rollouts_starts_from_the_export_and_goes_on_imitating(folder: Path) -> None:
    learned = imitate(folder, "learned", 120)
    losses = [point["sft_loss"] for point in read_metrics(learned, "finetune")]
    assert losses[0] > 0.25
    assert losses[-1] < 0.05
    mixed = (f"sft.datasets=[{folder / 'solved.jsonl'}]", "sft.per_step=16", "sft.weight=0.1")
    start = (f"model_path={learned / 'exports' / 'step_120'}", "finetune.max_train_steps=3", "eval.at_end=false")
    summary = run_experiment("quickstart", folder / "rl", *COMMON[:2], *start, *mixed, timeout_s=TIMEOUT_S)
    assert summary["success_before"] > 0.8
    points = list(read_metrics(folder / "rl", "finetune"))
    assert all(0 < point["sft_tokens"] < point["tokens"] for point in points)
    assert all(point["sft_loss"] < 0.1 for point in points)
