"""The trainer killed at random moments and started again ends with the weights of an undisturbed run, to the bit."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.finetune.synthetic import make_samples, pack, split_evenly
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.models import save_qwen2

SCRIPT = Path(__file__).parents[1] / "ranks" / "trainer_role.py"
STEPS, VOCAB = 40, 64
DEADLINE_S = 120


def make_run(folder: Path, model: Path) -> Path:
    """A run folder with recorded data for all steps."""
    folder.mkdir()
    (folder / "model").symlink_to(model)
    set_streams_backend("files")
    with open_writer(SingleStreamSpec(folder, "training_data"), MicroBatch) as writer:
        for step in range(STEPS):
            samples = make_samples(0, 6, vocab_size=VOCAB, lengths=(5, 9), step=step, max_lag=2)
            for record in pack(samples, split_evenly(6, 2), step):
                writer.write(record)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), VOCAB, layers=1)


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    overrides = [
        f"output_dir={run_dir}",
        f"model_path={run_dir / 'model'}",
        "dataset_loader=a.b",
        "actor.rollout_policy=a.b",
        "wandb.mode=disabled",
        f"finetune.max_train_steps={STEPS}",
        "finetune.save_checkpoint_steps=3",
        "finetune.learning_rate=1e-2",
        "finetune.dtype=float32",
        "finetune.lora={enabled: true, r: 4, alpha: 8, dropout: 0.1, target_modules: all-linear}",
        "finetune.rl.advantage=value",
        "finetune.rl.value_loss_coef=0.5",
    ]
    log = (run_dir / "log.txt").open("ab")
    with log:
        return subprocess.Popen([sys.executable, str(SCRIPT), str(run_dir), *overrides], stdout=log, stderr=log)


def steps_logged(run_dir: Path) -> int:
    """Steps that were ever reported, repeated ones included."""
    path = run_dir / "metrics" / "finetune.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process: subprocess.Popen[bytes], run_dir: Path, steps: int, pause_s: float) -> None:
    """SIGKILL a moment after ``steps`` more steps, unless it ends before."""
    goal, deadline = steps_logged(run_dir) + steps, time.monotonic() + DEADLINE_S
    while process.poll() is None and steps_logged(run_dir) < goal:
        assert time.monotonic() < deadline, (run_dir / "log.txt").read_text()[-3000:]
        time.sleep(0.002)
    time.sleep(pause_s)
    process.kill()
    process.wait()


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"step_{STEPS}" / "state-00000.safetensors")


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_killed_trainer_ends_bit_equal_to_the_undisturbed(kills: int, model: Path, tmp_path: Path) -> None:
    """With LoRA dropout, so that the random generators count, and a value head."""
    calm, killed = make_run(tmp_path / "calm", model), make_run(tmp_path / "killed", model)
    assert start(calm).wait(DEADLINE_S) == 0, (calm / "log.txt").read_text()[-3000:]

    rng = random.Random(7)
    for _ in range(kills):
        kill_after(start(killed), killed, rng.randint(1, 12), rng.uniform(0, 0.03))
    assert start(killed).wait(DEADLINE_S) == 0, (killed / "log.txt").read_text()[-3000:]

    expected, actual = final_state(calm), final_state(killed)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    losses = {}
    for line in (killed / "metrics" / "finetune.jsonl").read_text().splitlines():
        point = json.loads(line)
        losses.setdefault(point["step"], set()).add(point["loss"])
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(values) == 1 for values in losses.values())
