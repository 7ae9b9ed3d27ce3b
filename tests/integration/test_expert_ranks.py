"""Ranks that divide the experts of a mixture: the steps of one rank that holds all. Four processes, Gloo.

Servers get every byte once: `test_weight_stripes.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine_runs import run_ranks, trainer_imported
from tests.models import make_mixture, save_with_words

STEPS, HALF = 8, 4
SGD = ["finetune.optimizer.name=torch.optim.SGD", "finetune.learning_rate=1.0", "finetune.lr_scheduler_type=constant"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    with trainer_imported():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_words(make_mixture(64), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the run of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(folder / "out.json", 1, "ddp", model, steps=[0, STEPS], save_at=HALF, save=str(folder))
    return folder


def check_steps(ours: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy", "ess"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), f"step {step} {name}"
        assert mine["tokens"] == theirs["tokens"]


def metrics(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "out.json").read_text())


def check_run(engine: str, model: Path, alone: Path, folder: Path) -> None:
    """Four ranks train as one does, also what they export."""
    out = folder / "out.json"
    ours = run_ranks(out, 4, engine, model, steps=[0, STEPS], save_at=HALF, save=str(folder))
    check_steps(ours, metrics(alone))
    check_weights(out.with_suffix(".safetensors"), alone / "out.safetensors", 1e-4)
    exported = f"exports/step_{HALF}/model.safetensors"
    check_weights(folder / exported, alone / exported, 1e-4)


def check_weights(ours: Path, expected: Path, tolerance: float) -> None:
    mine, theirs = load_file(ours), load_file(expected)
    assert {name: tensor.shape for name, tensor in mine.items()} == {name: t.shape for name, t in theirs.items()}
    assert max((mine[name] - theirs[name]).abs().max().item() for name in theirs) <= tolerance


def test_steps_and_checkpoints_are_those_of_one_rank(model: Path, alone: Path, tmp_path: Path) -> None:
    """Its checkpoint resumes on one rank, and that of one rank on it."""
    check_run("experts", model, alone, tmp_path)
    again: dict[str, Any] = {"steps": [HALF, STEPS]}
    expected = metrics(alone)[HALF:]
    check_steps(run_ranks(tmp_path / "one.json", 1, "ddp", model, load=str(tmp_path), **again), expected)
    check_steps(run_ranks(tmp_path / "four.json", 4, "experts", model, load=str(alone), **again), expected)


def test_steps_of_several_copies_are_those_of_one_rank(model: Path, alone: Path, tmp_path: Path) -> None:
    check_run("experts_hsdp", model, alone, tmp_path)


def test_gradients_are_those_of_one_rank(model: Path, tmp_path: Path) -> None:
    """A step of size 1 of plain gradient descent without clipping subtracts the gradient."""
    job: dict[str, Any] = {"steps": [0, 1], "overrides": [*SGD, "finetune.gradient_clipping_threshold=null"]}
    for name, ranks, engine in (("one", 1, "ddp"), ("four", 4, "experts")):
        run_ranks(tmp_path / f"{name}.json", ranks, engine, model, **job)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "one.safetensors")
    head = "lm_head.weight"
    assert (before[head] - after[f"lm.{head}"]).abs().max() > 1e-2, "there is a gradient"
    check_weights(tmp_path / "four.safetensors", tmp_path / "one.safetensors", 1e-5)
