"""The trainer's loop in this process: recorded `training_data` in, steps, messages, checkpoints and sender out."""

import dataclasses
import gc
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.loop import Trainer
from pipelinerl.membership.role import RoleContext
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.observability.status import RoleStatus
from pipelinerl.records import (
    MicroBatch,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from tests.models import save_qwen2
from tests.states import read_state
from tests.trainer_kit import FakeSender, trainer_context, trainer_overrides

VOCAB = 64
STEPS = 6


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    save_qwen2(tmp_path / "model", VOCAB)
    set_streams_backend("files")
    record_steps(tmp_path, range(STEPS))
    return tmp_path


def record_steps(run_dir: Path, steps: range, seed: int = 0) -> None:
    with open_writer(SingleStreamSpec(run_dir, "training_data"), MicroBatch) as writer:
        for step in steps:
            samples = make_samples(seed, 6, vocab_size=VOCAB, lengths=(5, 9), step=step, max_lag=2)
            for record in pack(samples, split_evenly(6, 2), step, ref=False):
                writer.write(record)


def make_context(run_dir: Path, *overrides: str) -> RoleContext:
    steps = (f"finetune.max_train_steps={STEPS}", "finetune.save_checkpoint_steps=2")
    cfg = parse(compose("base", trainer_overrides(run_dir, *steps, *overrides)))
    return trainer_context(run_dir, cfg)


def train(run_dir: Path, *overrides: str) -> FakeSender:
    sender = FakeSender()
    ctx = make_context(run_dir, *overrides)
    Trainer(ctx, sender).run()
    return sender


def read_messages(run_dir: Path) -> list[Any]:
    with open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name="test", start=0) as reader:
        return [message for _, message in reader.read_all()]


def test_trainer_run_announces_every_step_and_version_in_order(run_dir: Path) -> None:
    sender = train(run_dir)

    messages = read_messages(run_dir)
    assert [v for v, _ in sender.received] == list(range(STEPS + 1))
    assert [m.version for m in messages if isinstance(m, WeightUpdateSuccess)] == list(range(STEPS + 1))
    processed = [m for m in messages if isinstance(m, SamplesProcessed)]
    assert [(m.step, m.samples_processed) for m in processed] == [(n, 6 * n) for n in range(1, STEPS + 1)]
    assert messages[-1] == TrainingDone(step=STEPS, timestamp=messages[-1].timestamp)
    assert {"loss", "grad_norm", "lr", "ess", "lag_max", "entropy", "wait_s"} <= processed[0].metrics.keys()
    assert processed[-1].metrics["lag_max"] <= 2


def test_trainer_is_ready_before_its_servers_and_data_and_reports_progress_within_a_step(run_dir: Path) -> None:
    status = RoleStatus(run_dir, "finetune_0")
    ctx = dataclasses.replace(make_context(run_dir, "finetune.max_train_steps=1"), status=status)
    trainer, counts = Trainer(ctx, FakeSender()), {}
    start, report = trainer.updates.start, trainer.outputs.report  # type: ignore[union-attr]

    def starting(*args: Any, **kwargs: Any) -> None:
        counts["servers"] = status.record().progress_count
        start(*args, **kwargs)
        counts["data"] = status.record().progress_count

    def reporting(*args: Any) -> None:
        counts["trained"] = status.record().progress_count
        report(*args)

    trainer.updates.start, trainer.outputs.report = starting, reporting  # type: ignore[union-attr, method-assign]
    trainer.run()
    layers = trainer.engine.policy.lm.config.num_hidden_layers
    assert counts["servers"] == 1
    assert counts["trained"] - counts["data"] > 4 * layers, "forward and backward of two micro-batches, and the head"
    status.close()


def test_trainer_run_that_has_ended_hides_no_objects_from_the_garbage_collector(run_dir: Path) -> None:
    """Those of C extensions would still be alive when the process ends, which nanobind reports as leaks."""
    train(run_dir)
    assert gc.get_freeze_count() == 0


def test_trainer_pushed_weights_are_those_of_the_checkpoint(run_dir: Path) -> None:
    sender = train(run_dir)

    version, last = sender.received[-1]
    lm = AutoModelForCausalLM.from_pretrained(run_dir / "exports" / f"step_{STEPS}", dtype=torch.float32)
    expected = dict(lm.named_parameters())
    assert version == STEPS
    assert last.keys() == expected.keys()
    for name, tensor in last.items():
        assert torch.equal(tensor, expected[name]), name
    first = sender.received[0][1]
    assert any(not torch.equal(first[name], last[name]) for name in last)


def test_trainer_scores_the_probes_text_with_the_weights_it_pushed(run_dir: Path) -> None:
    sender = train(run_dir)

    lm = AutoModelForCausalLM.from_pretrained(run_dir / "exports" / f"step_{STEPS}", dtype=torch.float32)
    assert sender.text is not None
    ids = torch.from_numpy(sender.text.token_ids).long()
    with torch.no_grad():
        expected = lm(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).flatten().numpy()
    first, *_, last = (scores.result(0) for scores in sender.scores if scores is not None)
    np.testing.assert_allclose(last, expected, atol=1e-5)
    np.testing.assert_array_equal(first, sender.text.logprobs)
    assert not np.array_equal(first, last)


def test_resumed_trainer_calibrates_on_the_text_and_scores_of_version_0(run_dir: Path) -> None:
    text = train(run_dir, "finetune.max_train_steps=2").text
    again = train(run_dir).text
    assert text is not None
    assert again is not None
    np.testing.assert_array_equal(again.token_ids, text.token_ids)
    np.testing.assert_array_equal(again.logprobs, text.logprobs)


def test_trainer_resumed_from_checkpoint_ends_bit_equal(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    uninterrupted = train(run_dir).received[-1][1]

    other = tmp_path_factory.mktemp("other")
    (other / "model").symlink_to(run_dir / "model")
    record_steps(other, range(STEPS))
    ctx = make_context(other)
    trainer = Trainer(ctx, FakeSender())
    for _ in range(3):
        trainer.advance()
    trainer.close()  # as if killed after step 3: the newest checkpoint is that of step 2
    resumed = train(other)

    assert resumed.received[0][0] == 2
    for name, tensor in resumed.received[-1][1].items():
        assert torch.equal(tensor, uninterrupted[name]), name
    state = read_state(other / "checkpoints" / f"step_{STEPS}")
    expected = read_state(run_dir / "checkpoints" / f"step_{STEPS}")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_trainer_stopped_saves_its_last_step_and_repeats_none(run_dir: Path) -> None:
    ctx = make_context(run_dir, "finetune.save_checkpoint_steps=100")
    stop_after(ctx, step=3)
    Trainer(ctx, FakeSender()).run()

    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_3"]
    assert not (run_dir / "exports").exists()
    resumed = train(run_dir, "finetune.save_checkpoint_steps=100")
    assert resumed.received[0][0] == 3
    assert [point["step"] for point in read_metrics(run_dir, "finetune")] == list(range(1, STEPS + 1))
    assert TrainingResumed(step=3, repeated=0, samples_processed=18) in [
        without_time(message) for message in read_messages(run_dir)
    ]


def test_trainer_resumed_says_what_it_repeats_and_holds_each_step_once(run_dir: Path) -> None:
    trainer = Trainer(make_context(run_dir), FakeSender())
    for _ in range(3):
        trainer.advance()
    trainer.close()
    train(run_dir)

    assert [point["step"] for point in read_metrics(run_dir, "finetune")] == list(range(1, STEPS + 1))
    assert TrainingResumed(step=2, repeated=1, samples_processed=12) in [
        without_time(message) for message in read_messages(run_dir)
    ]


def test_trainer_saves_in_between_when_the_newest_checkpoint_is_old(run_dir: Path) -> None:
    overrides = ["finetune.save_checkpoint_steps=100", "finetune.save_checkpoint_minutes=1e-9"]
    trainer = Trainer(make_context(run_dir, *overrides), FakeSender())
    trainer.advance()
    trainer.close()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_1"]

    train(run_dir, *overrides)
    assert [path.name for path in (run_dir / "exports").iterdir()] == [f"step_{STEPS}"]


def test_trainer_exports_the_model_it_resumes_from_when_that_was_lost(run_dir: Path) -> None:
    trainer = Trainer(make_context(run_dir), FakeSender())
    for _ in range(2):
        trainer.advance()
    trainer.close()
    shutil.rmtree(run_dir / "exports" / "step_2")
    train(run_dir)
    assert sorted(path.name for path in (run_dir / "exports").iterdir()) == ["step_2", "step_4", "step_6"]


def stop_after(ctx: RoleContext, step: int) -> None:
    """Ask the trainer to stop as soon as it reports ``step``."""

    def progress(**fields: Any) -> None:
        if fields.get("step") == step:
            ctx.stop.set()

    ctx.status.progress = progress  # type: ignore[method-assign]


def without_time(message: Any) -> Any:
    return msgspec.structs.replace(message, timestamp=0.0)
