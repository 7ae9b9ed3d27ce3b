"""Which versions go out: due ones, the newest of those that had to wait, none during an evaluation."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.evaluation_lease import EvaluationLease
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.updates import WeightUpdates, is_push_due
from pipelinerl.records import EvaluationDone, EvaluationStarted
from tests.models import make_qwen2
from tests.trainer_kit import FakeSender


class Engine:
    """One rank with one parameter."""

    rank, world_size, device = 0, 1, torch.device("cpu")
    policy = Policy(make_qwen2(8, hidden=8, intermediate=8))

    def named_full_parameters(self, dtype: Any) -> Any:
        yield "lm.w", torch.zeros(4)

    def full_shapes(self) -> Any:
        return [("lm.w", (4,))]

    def broadcast_object(self, value: Any) -> Any:
        return value


class Harness:
    def __init__(self, *overrides: str) -> None:
        self.sender, self.messages = FakeSender(wants_scores=False), []
        given = ("output_dir=out", "dataset_loader=a.b", "actor.rollout_policy=a.b")
        settings = (*given, "finetune.max_train_steps=10", *overrides)
        cfg = parse(compose("base", [*settings, "weights.probe=false"]))
        status: Any = SimpleNamespace(waiting=lambda *_, **__: contextlib.nullcontext())
        lease = EvaluationLease(self._take, clock=lambda: 0.0)
        engine: Any = Engine()
        self.updates = WeightUpdates(engine, cfg, self.sender, self.sender, lease, status, lambda: False, Path("."))

    def _take(self) -> list[Any]:
        taken, self.messages[:] = list(self.messages), []
        return taken

    @property
    def sent(self) -> list[int]:
        return [version for version, _ in self.sender.received]


def test_push_is_due_every_interval_and_at_the_end() -> None:
    assert [step for step in range(1, 11) if is_push_due(step, 4, 10)] == [4, 8, 10]


def test_versions_that_come_while_servers_are_busy_are_skipped_for_the_newest() -> None:
    harness = Harness()
    harness.updates.after_step(1)
    harness.sender.is_busy = True
    for step in (2, 3, 4):
        assert harness.updates.after_step(step) < 1
        assert harness.updates.deferred
    harness.sender.is_busy = False
    harness.updates.after_step(5)
    assert harness.sent == [1, 5]
    assert not harness.updates.deferred


def test_version_that_had_to_wait_goes_out_while_the_trainer_waits_for_data() -> None:
    harness = Harness()
    harness.sender.is_busy = True
    harness.updates.after_step(1)
    harness.updates.retry(1)
    assert harness.sent == []
    harness.sender.is_busy = False
    harness.updates.retry(1)
    harness.updates.retry(1)
    assert harness.sent == [1]


def test_deferred_version_goes_out_after_the_next_step_although_that_one_is_not_due() -> None:
    harness = Harness("finetune.weight_update_interval=4")
    harness.sender.is_busy = True
    for step in range(1, 6):
        harness.updates.after_step(step)
    assert harness.updates.deferred
    harness.sender.is_busy = False
    for step in range(6, 9):
        harness.updates.after_step(step)
    assert harness.sent == [6, 8]


def test_nothing_goes_out_during_an_evaluation_of_another_version() -> None:
    harness = Harness()
    harness.messages.append(EvaluationStarted(version=1, deadline=100.0))
    harness.updates.after_step(2)
    assert harness.sent == []
    harness.messages.append(EvaluationDone(version=1, success=0.0, reward=0.0, num_rollouts=1, metrics={}))
    harness.updates.retry(2)
    assert harness.sent == [2]


def test_evaluation_of_a_version_that_a_resumed_trainer_has_lost_does_not_hold_back_its_first_weights() -> None:
    harness = Harness()
    harness.messages.append(EvaluationStarted(version=6, deadline=100.0))
    harness.updates.start(16, num_servers=1, resumed=True)
    assert harness.sent == [16]
    harness.updates.after_step(17)
    assert harness.sent == [16]
    harness.messages.append(EvaluationStarted(version=16, deadline=100.0))
    harness.messages.append(EvaluationDone(version=16, success=0.5, reward=0.5, num_rollouts=1, metrics={}))
    harness.updates.retry(17)
    assert harness.sent == [16, 17]


def test_error_of_the_sender_reaches_the_training_loop() -> None:
    harness = Harness()
    harness.sender.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        harness.updates.retry(1)
