"""Which versions go out: due ones, the newest of those that had to wait, none during an evaluation."""

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import DeadlineError
from pipelinerl.finetune import updates
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.updates import EvaluationLease, WeightUpdates, is_push_due
from pipelinerl.records import EvaluationDone, EvaluationStarted
from pipelinerl.weights.verify.probe import ProbeText
from tests.models import make_qwen2
from tests.trainer_kit import FakeSender


def never() -> bool:
    """The next step's data are missing."""
    return False


class Engine:
    """One rank with one parameter."""

    rank, world_size, device = 0, 1, torch.device("cpu")
    policy = Policy(make_qwen2(8, hidden=8, intermediate=8))

    def named_full_parameters(self, dtype: Any) -> Any:
        yield "lm.w", torch.zeros(4)

    def full_shapes(self) -> Any:
        return [("lm.w", (4,))]

    def __init__(self) -> None:
        self.meetings = 0

    def broadcast_object(self, value: Any) -> Any:
        self.meetings += 1
        return value


class Harness:
    def __init__(self, *overrides: str) -> None:
        self.sender, self.messages = FakeSender(wants_scores=False), []
        given = ("output_dir=out", "dataset_loader=a.b", "actor.rollout_policy=a.b")
        settings = (*given, "finetune.max_train_steps=10", *overrides)
        cfg = parse(compose("base", [*settings, "weights.probe=false"]))
        status: Any = SimpleNamespace(waiting=lambda *_, **__: contextlib.nullcontext())
        lease = EvaluationLease(self._pop_messages, clock=lambda: 0.0)
        self.engine: Any = Engine()
        self.updates = WeightUpdates(
            self.engine, cfg, self.sender, self.sender, lease, status, lambda: False, Path(".")
        )

    def _pop_messages(self) -> list[Any]:
        taken, self.messages[:] = list(self.messages), []
        return taken

    @property
    def sent(self) -> list[int]:
        return [version for version, _ in self.sender.received]


def test_push_is_due_every_interval_and_at_the_end() -> None:
    assert [step for step in range(1, 11) if is_push_due(step, 4, 10)] == [4, 8, 10]


def test_versions_that_come_while_servers_are_busy_are_skipped_for_the_newest() -> None:
    harness = Harness()
    harness.updates.after_step(1, never)
    harness.sender.is_busy = True
    for step in (2, 3, 4):
        assert harness.updates.after_step(step, never) < 1
        assert harness.updates.deferred
    harness.sender.is_busy = False
    harness.updates.after_step(5, never)
    assert harness.sent == [1, 5]
    assert not harness.updates.deferred


def test_version_that_had_to_wait_goes_out_while_the_trainer_waits_for_data() -> None:
    harness = Harness()
    harness.sender.is_busy = True
    harness.updates.after_step(1, never)
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
        harness.updates.after_step(step, never)
    assert harness.updates.deferred
    harness.sender.is_busy = False
    for step in range(6, 9):
        harness.updates.after_step(step, never)
    assert harness.sent == [6, 8]


def test_nothing_goes_out_during_an_evaluation_of_another_version() -> None:
    harness = Harness()
    harness.messages.append(EvaluationStarted(version=1, deadline=100.0))
    harness.updates.after_step(2, never)
    assert harness.sent == []
    harness.messages.append(EvaluationDone(version=1, success=0.0, reward=0.0, num_rollouts=1, metrics={}))
    harness.updates.retry(2)
    assert harness.sent == [2]


def test_evaluation_of_a_version_that_a_resumed_trainer_has_lost_does_not_hold_back_its_first_weights() -> None:
    harness = Harness()
    harness.messages.append(EvaluationStarted(version=6, deadline=100.0))
    harness.updates.start(16, num_servers=1, resumed=True)
    assert harness.sent == [16]
    harness.updates.after_step(17, never)
    assert harness.sent == [16]
    harness.messages.append(EvaluationStarted(version=16, deadline=100.0))
    harness.messages.append(EvaluationDone(version=16, success=0.5, reward=0.5, num_rollouts=1, metrics={}))
    harness.updates.retry(17)
    assert harness.sent == [16, 17]


@pytest.mark.parametrize(
    ("needs_scores", "data", "is_scored", "is_idle"),
    [
        pytest.param(False, [False, False], True, True, id="data are missing until the end"),
        pytest.param(False, [False, True], True, False, id="data come meanwhile"),
        pytest.param(False, [True], False, False, id="data are there"),
        pytest.param(True, [True], True, False, id="data are there, and a server is unverified"),
        pytest.param(True, [False], True, True, id="data are missing, and a server is unverified"),
    ],
)
def test_probe_is_scored_while_data_are_missing_or_a_server_is_unverified(
    monkeypatch: pytest.MonkeyPatch, needs_scores: bool, data: list[bool], is_scored: bool, is_idle: bool
) -> None:
    clock, scores, answers = [0.0], np.zeros(3, dtype=np.float32), iter(data)

    def score(engine: Any, text: ProbeText) -> np.ndarray:
        clock[0] += 8.0
        return scores

    monkeypatch.setattr(updates, "score_text", score)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    harness = Harness()
    harness.sender.due, harness.sender.needs_scores = True, needs_scores
    harness.updates._text = ProbeText(token_ids=np.zeros((1, 4), dtype=np.int32))
    still_s = harness.updates.after_step(1, lambda: next(answers))
    assert next(answers, None) is None
    (future,) = harness.sender.scores
    assert (future is not None) == is_scored
    assert future is None or future.result(0) is scores
    assert harness.updates.idle_s == (8.0 if is_idle else 0.0)
    assert still_s == (8.0 if is_scored and not is_idle else 0.0)


def test_deferred_version_is_scored_while_the_trainer_waits_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.zeros(3, dtype=np.float32)
    monkeypatch.setattr(updates, "score_text", lambda engine, text: scores)
    harness = Harness()
    harness.sender.due, harness.sender.needs_scores = True, False
    harness.updates._text = ProbeText(token_ids=np.zeros((1, 4), dtype=np.int32))
    harness.sender.is_busy = True
    harness.updates.after_step(1, never)
    harness.sender.is_busy = False
    harness.updates.retry(1)
    assert [future and future.result(0) is scores for future in harness.sender.scores] == [True]
    assert harness.updates.idle_s == 0.0


def test_error_of_the_sender_reaches_the_training_loop() -> None:
    harness = Harness()
    harness.sender.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        harness.updates.retry(1)


@pytest.mark.parametrize("num_answering", [0, 2])
def test_start_has_a_limit_for_servers_that_do_not_answer_and_none_for_slow_ones(num_answering: int) -> None:
    """The second of two is ready at the sixth look."""
    harness = Harness("launcher.startup_timeout_s=1e-9")
    looks = iter(range(5))
    harness.sender.wait_for_servers = lambda count, timeout_s: 1 if next(looks, None) is not None else 2  # type: ignore[method-assign]
    harness.sender.num_answering = num_answering
    if num_answering:
        harness.updates.start(0, num_servers=2, resumed=False)
        assert harness.sent == [0]
    else:
        with pytest.raises(DeadlineError, match=r"2 of 2 .*startup_timeout_s=1e-09"):
            harness.updates.start(0, num_servers=2, resumed=False)


def test_ranks_meet_at_each_look_at_the_servers_so_that_no_collective_waits_for_one() -> None:
    """The server is there at the fourth look, and has the first weights at the seventh."""
    harness = Harness("launcher.startup_timeout_s=3600")
    sender, met = harness.sender, []

    def look(answers: Any, last: Any) -> Any:
        met.append(harness.engine.meetings)
        return next(answers, last)

    there, live = iter([0] * 3), iter([False] * 6)
    sender.wait_for_servers = lambda count, timeout_s: look(there, 1)  # type: ignore[method-assign]
    sender.wait_live = lambda version, timeout_s: look(live, True)  # type: ignore[method-assign]
    harness.updates.start(0, num_servers=1, resumed=False)
    assert len(met) == 4 + 7
    assert met == sorted(set(met)), "two looks without a meeting between them"
