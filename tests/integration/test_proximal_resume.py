"""A run that resumes inside a block of steps with one proximal policy is, bit for bit, the run without interruption.

The trainer in this process over recorded data, and the ranks of every engine as processes.
"""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.loop import Trainer
from pipelinerl.inspect.replay.inputs import TIMINGS
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.streams import set_streams_backend
from pipelinerl.streams.epoch import StreamEpoch, write_epoch
from tests.engine_runs import ENGINES, run_ranks, trainer_imported
from tests.integration.test_trainer_loop import VOCAB, make_context, record_steps, stop_after
from tests.models import save_qwen2
from tests.states import read_state
from tests.trainer_kit import FakeSender

STEPS = 8
WAITS = {*TIMINGS, "wait_s", "push_wait_s", "push_pause_ms", "push_transfer_ms", "time"}
NARROW = ["finetune.rl.epsilon_low=1e-5", "finetune.rl.epsilon_high=1e-5"]
LOSSES = {2: "ppo", 3: "gspo", 4: "decoupled_ppo"}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def overrides(every: int) -> list[str]:
    steps = [f"finetune.max_train_steps={STEPS}", "finetune.save_checkpoint_steps=100"]
    loss = [f"finetune.rl.policy_loss={LOSSES[every]}", f"finetune.rl.proximal_every={every}", *NARROW]
    return [*steps, *loss, "finetune.rl.token_tis=2"]


def new_run(folder: Path, model: Path) -> Path:
    folder.mkdir()
    (folder / "model").symlink_to(model)
    set_streams_backend("files")
    record_steps(folder, range(STEPS))
    return folder


def train(run_dir: Path, every: int, *, until: int = STEPS) -> None:
    """Train, and after step ``until`` do what SIGTERM asks for."""
    ctx = make_context(run_dir, *overrides(every))
    stop_after(ctx, until)
    Trainer(ctx, FakeSender()).run()


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every step, without times."""
    return [
        {name: value for name, value in point.items() if name not in WAITS}
        for point in read_metrics(run_dir, "finetune")
    ]


def assert_equal(run_dir: Path, other: Path) -> None:
    mine, theirs = figures(run_dir), figures(other)
    assert [point["step"] for point in mine] == list(range(1, STEPS + 1))
    for ours, expected in zip(mine, theirs, strict=True):
        assert ours == expected, f"step {ours['step']}"
    state, wanted = (read_state(path / "checkpoints" / f"step_{STEPS}") for path in (run_dir, other))
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    with trainer_imported():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("proximal_model") / "model", VOCAB)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Uninterrupted runs by N."""
    found = {every: new_run(tmp_path_factory.mktemp("whole") / str(every), model) for every in LOSSES}
    for every, run_dir in found.items():
        train(run_dir, every)
    return found


@pytest.mark.parametrize("every", LOSSES)
def test_clip_acts_inside_the_blocks_of_the_whole_run(every: int, whole: dict[int, Path]) -> None:
    """So the other tests compare steps in which π_prox matters."""
    for point in figures(whole[every]):
        inside = (point["step"] - 1) % every > 0
        assert (point["clip_fraction"] > 0) == inside, point["step"]


@pytest.mark.parametrize("every", [slow(2), slow(3), 4])
def test_run_stopped_after_every_step_is_the_whole_run(
    every: int, whole: dict[int, Path], model: Path, tmp_path: Path
) -> None:
    run_dir = new_run(tmp_path / "run", model)
    for step in range(1, STEPS + 1):
        train(run_dir, every, until=step)
        counters = checkpoints.read_counters(run_dir / "checkpoints" / f"step_{step}")
        border = step - step % every
        assert counters.proximal_made_at == (None if border == step or step == STEPS else border)
    assert_equal(run_dir, whole[every])


@pytest.mark.parametrize(("every", "stopped"), [(4, 6), (3, 4), slow(4, 5), slow(4, 7)])
def test_run_stopped_once_is_the_whole_run(
    every: int, stopped: int, whole: dict[int, Path], model: Path, tmp_path: Path
) -> None:
    run_dir = new_run(tmp_path / "run", model)
    train(run_dir, every, until=stopped)
    train(run_dir, every)
    assert_equal(run_dir, whole[every])


def test_run_killed_after_a_checkpoint_inside_a_block_is_the_whole_run(
    whole: dict[int, Path], model: Path, tmp_path: Path
) -> None:
    run_dir = new_run(tmp_path / "run", model)
    train(run_dir, 4, until=5)
    trainer = Trainer(make_context(run_dir, *overrides(4)), FakeSender())
    trainer.advance()
    trainer.close()  # after step 6; the newest checkpoint is that of step 5
    train(run_dir, 4)
    assert_equal(run_dir, whole[4])


def test_checkpoint_without_proximal_policy_begins_a_block_and_says_so(
    whole: dict[int, Path], model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With new streams (`resume=checkpoint`) the data of the block are other ones, so its π_prox is of no use."""
    run_dir = new_run(tmp_path / "run", model)
    train(run_dir, 4, until=5)
    write_epoch(run_dir, StreamEpoch(number=2, step=5))
    with caplog.at_level(logging.WARNING):
        train(run_dir, 4)
    assert "event=proximal_block_begins_late step=5 block=4" in caplog.text
    assert figures(run_dir)[:5] == figures(whole[4])[:5]
    assert figures(run_dir)[5]["clip_fraction"] == 0


def test_proximal_policy_of_other_data_is_not_used(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = new_run(tmp_path / "run", model)
    train(run_dir, 4, until=5)
    shutil.rmtree(run_dir / "streams" / "training_data")
    record_steps(run_dir, range(STEPS), seed=7)
    with caplog.at_level(logging.WARNING):
        train(run_dir, 4)
    assert "event=proximal_policy_dropped step=5" in caplog.text
    assert figures(run_dir)[5]["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("engine", "ranks", "saved"),
    [
        *[("fsdp2", 2, 6), slow("zero3", 2, 5)],
        *[slow(engine, 2, 7) for engine in ENGINES],
    ],
)
def test_every_engine_goes_on_inside_a_block_bit_for_bit(
    engine: str, ranks: int, saved: int, model: Path, tmp_path: Path
) -> None:
    own = [f"finetune.max_train_steps={STEPS}", "finetune.rl.policy_loss=ppo", "finetune.rl.proximal_every=4", *NARROW]
    expected = run_ranks(
        tmp_path / "whole.json",
        ranks,
        engine,
        model,
        steps=[0, STEPS],
        save_at=saved,
        save=str(tmp_path / "saved"),
        overrides=own,
    )
    resumed = run_ranks(
        tmp_path / "resumed.json",
        ranks,
        engine,
        model,
        steps=[saved, STEPS],
        load=str(tmp_path / "saved"),
        overrides=own,
    )
    assert (
        json.loads((tmp_path / "saved" / "checkpoints" / f"step_{saved}" / "manifest.json").read_text())["counters"][
            "proximal_made_at"
        ]
        == 4
    )
    assert any(step["clip_fraction"] > 0 for step in expected[5:])
    for mine, theirs in zip(resumed, expected[saved:], strict=True):
        assert {n: v for n, v in mine.items() if n not in WAITS} == {n: v for n, v in theirs.items() if n not in WAITS}
    weights, wanted = (load_file(tmp_path / f"{name}.safetensors") for name in ("resumed", "whole"))
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
