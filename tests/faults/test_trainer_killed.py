"""The trainer killed at random moments and started again ends with the weights of an undisturbed run."""

import contextlib
import json
import random
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from benchmarks.receivers import forkserver
from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.models import save_qwen2
from tests.rank_processes import start_ranks
from tests.ranks import trainer_role
from tests.states import read_state
from tests.trainer_kit import trainer_overrides

STEPS, VOCAB = 40, 64
DEADLINE_S = 120


@pytest.fixture(scope="module", autouse=True)
def role_imported_once() -> Iterator[None]:
    with forkserver(trainer_role.__name__):
        yield


def make_run(folder: Path, model: Path, ranks: int) -> Path:
    """A run folder with recorded data for all steps: two micro-batches each, on one rank or on two."""
    folder.mkdir()
    (folder / "model").symlink_to(model)
    set_streams_backend("files")
    rank_of = [0, ranks - 1]
    with contextlib.ExitStack() as stack:
        specs = [SingleStreamSpec(folder, "training_data", 0, rank) for rank in range(ranks)]
        writers = [stack.enter_context(open_writer(spec, MicroBatch)) for spec in specs]
        for step in range(STEPS):
            samples = make_samples(0, 6, vocab_size=VOCAB, lengths=(5, 9), step=step, max_lag=2)
            for rank, record in zip(rank_of, pack(samples, split_evenly(6, 2), step, rank_of=rank_of), strict=True):
                writers[rank].write(record)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), VOCAB, layers=1)


def start(run_dir: Path, ranks: int) -> list[BaseProcess]:
    overrides = trainer_overrides(
        run_dir,
        f"finetune.max_train_steps={STEPS}",
        "finetune.save_checkpoint_steps=3",
        "finetune.engine=ddp",
        "finetune.lora={enabled: true, r: 4, alpha: 8, dropout: 0.1, target_modules: all-linear}",
        "finetune.rl.advantage=value",
        "finetune.rl.value_loss_coef=0.5",
    )
    job = {"run_dir": str(run_dir), "overrides": overrides}
    return start_ranks(trainer_role.main, job, run_dir / "trainer", ranks)


def logs(run_dir: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in run_dir.glob("trainer.rank*.log"))


def wait(processes: list[BaseProcess], run_dir: Path) -> None:
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * len(processes), logs(run_dir)


def steps_logged(run_dir: Path) -> list[int]:
    """Steps in the metrics."""
    path = run_dir / "metrics" / "finetune.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics" / "finetune.jsonl").read_text().splitlines()]


def kill_at(processes: list[BaseProcess], run_dir: Path, step: int, pause_s: float) -> None:
    """SIGKILL a moment after these processes have made ``step``, the last rank first."""
    deadline = time.monotonic() + DEADLINE_S
    while max(steps_logged(run_dir), default=0) < step:
        assert all(process.is_alive() for process in processes), logs(run_dir)
        assert time.monotonic() < deadline, logs(run_dir)
        time.sleep(0.002)
    time.sleep(pause_s)
    for process in reversed(processes):
        process.kill()
        process.join()


def final_state(run_dir: Path) -> dict[str, torch.Tensor]:
    return read_state(run_dir / "checkpoints" / f"step_{STEPS}")


@pytest.mark.parametrize(
    ("ranks", "kills", "tolerance"),
    [(1, 1, 0.0), pytest.param(1, 10, 0.0, marks=pytest.mark.slow), pytest.param(2, 10, 1e-6, marks=pytest.mark.slow)],
)
@pytest.mark.timeout(900)
def test_killed_trainer_ends_with_the_weights_of_the_undisturbed(
    ranks: int, kills: int, tolerance: float, model: Path, tmp_path: Path
) -> None:
    """With LoRA dropout, so that the random generators count, and a value head. One rank: to the bit."""
    calm, killed = make_run(tmp_path / "calm", model, ranks), make_run(tmp_path / "killed", model, ranks)
    wait(start(calm, ranks), calm)

    rng = random.Random(7)
    for step in sorted(rng.sample(range(1, STEPS), kills)):
        kill_at(start(killed, ranks), killed, step, rng.uniform(0, 0.03))
    wait(start(killed, ranks), killed)

    expected, actual = final_state(calm), final_state(killed)
    assert actual.keys() == expected.keys()
    worst = max(float((actual[name] - tensor).abs().max()) for name, tensor in expected.items())
    print(f"ranks={ranks} kills={kills} largest_difference={worst}")
    assert worst <= tolerance
    if tolerance:
        return
    assert steps_logged(killed) == list(range(1, STEPS + 1)), "each step is once in the metrics"
    assert losses(killed) == losses(calm)
