"""States are saved as they were when the saving began, whatever training does meanwhile."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import CheckpointError
from pipelinerl.finetune import checkpoints, saving
from pipelinerl.finetune.checkpoints import Counters, list_steps
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.loop import Trainer
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.saving import Saver, SaveRules
from tests.models import make_qwen2
from tests.says import says

EMBEDDING = "lm.model.embed_tokens.weight"


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None: ...


def make_engine() -> ReplicatedEngine:
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    return ReplicatedEngine(Policy(make_qwen2(32, hidden=8)), cfg, torch.device("cpu"))


def make_saver(engine: ReplicatedEngine, run_dir: Path, keep: int = 2, keep_exports: int | None = None) -> Saver:
    rules = SaveRules(run_dir=run_dir, dtype=torch.float32, keep=keep, keep_exports=keep_exports)
    return Saver(engine, rules, Tokenizer())


def fill(engine: ReplicatedEngine, value: float) -> None:
    with torch.no_grad():
        engine.policy.get_parameter(EMBEDDING).fill_(value)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds every writing back until it is set."""
    event, write = threading.Event(), checkpoints.write

    def wait_and_write(*arguments: object) -> Path:
        assert event.wait(60)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saving.checkpoints, "write", wait_and_write)
    yield event
    event.set()


def test_saved_state_is_that_of_the_start_while_training_goes_on(tmp_path: Path, gate: threading.Event) -> None:
    engine = make_engine()
    saver = make_saver(engine, tmp_path)
    fill(engine, 1.0)
    saver.start(Counters(step=1, positions={"0/0": 7}), export=True)
    fill(engine, 2.0)  # the next optimizer step
    assert saver.poll() is None
    assert list_steps(tmp_path / "checkpoints") == []
    gate.set()
    assert saver.finish() == {"0/0": 7}
    assert saver.finish() is None

    other = make_engine()
    assert make_saver(other, tmp_path).resume() == Counters(step=1, positions={"0/0": 7})
    assert set(other.policy.get_parameter(EMBEDDING).flatten().tolist()) == {1.0}
    assert [step for step, _ in list_steps(tmp_path / "exports")] == [1]


def test_exports_outlive_checkpoints(tmp_path: Path) -> None:
    saver = make_saver(make_engine(), tmp_path, keep=1)
    for step in (1, 2, 3):
        saver.start(Counters(step=step, positions={"0/0": step}), export=step != 2)
        assert saver.finish() == {"0/0": step}
    assert [step for step, _ in list_steps(tmp_path / "checkpoints")] == [3]
    assert [step for step, _ in list_steps(tmp_path / "exports")] == [3, 1]
    assert saver.has_export(3)
    assert not saver.has_export(2)


def test_keep_exports_bounds_their_number(tmp_path: Path) -> None:
    saver = make_saver(make_engine(), tmp_path, keep_exports=1)
    for step in (1, 2):
        saver.start(Counters(step=step), export=True)
        saver.finish()
    assert [step for step, _ in list_steps(tmp_path / "exports")] == [2]


def test_step_that_is_saved_is_only_exported(tmp_path: Path) -> None:
    saver = make_saver(make_engine(), tmp_path)
    saver.start(Counters(step=4), export=False)
    saver.finish()
    written = (tmp_path / "checkpoints" / "step_4" / "manifest.json").stat().st_mtime_ns
    saver.start(Counters(step=4), export=True)
    saver.finish()
    assert (tmp_path / "checkpoints" / "step_4" / "manifest.json").stat().st_mtime_ns == written
    assert saver.has_export(4)


def test_streams_are_synced_before_the_checkpoint_that_points_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []
    publish = checkpoints.publish
    monkeypatch.setattr(checkpoints, "publish", lambda *paths: (done.append("publish"), publish(*paths)))
    rules = SaveRules(run_dir=tmp_path, dtype=torch.float32, keep=1, keep_exports=None)
    saver = Saver(make_engine(), rules, Tokenizer(), lambda: done.append("sync"))
    saver.start(Counters(step=1), export=False)
    saver.finish()
    assert done == ["sync", "publish"]


def test_writing_that_fails_is_told_to_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = make_saver(make_engine(), tmp_path)
    saver.start(Counters(step=1), export=False)
    with pytest.raises(CheckpointError, match=says("checkpoint", "step 1", tmp_path / "checkpoints")):
        saver.finish()


def test_checkpoint_of_the_trainer_makes_records_and_metrics_durable() -> None:
    """The trainer gives its saver this function, which runs before a checkpoint is complete."""
    synced: list[str] = []
    feed, outputs = (SimpleNamespace(sync=lambda name=name: synced.append(name)) for name in ("feed", "metrics"))
    for rank_outputs in (outputs, None):
        trainer = Trainer.__new__(Trainer)
        trainer.feed, trainer.outputs = feed, rank_outputs
        trainer.sync()
    assert synced == ["feed", "metrics", "feed"]
