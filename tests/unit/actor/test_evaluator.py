"""An evaluation counts no result of a server that did not use the version that is evaluated."""

from itertools import cycle

import pytest

from pipelinerl.actor.messages import GroupFinished, StartGroup
from pipelinerl.records import EvaluationDone
from tests.actor_stage import Stage, missed_probe, rollout

SUCCESS = {"s": 1.0, "t": 0.0}


def evaluating(tests: int = 4) -> Stage:
    """An evaluation of version 1 on two servers that take turns. ``s`` has not been verified with it."""
    turn = cycle("st")

    def answer(start: StartGroup) -> GroupFinished:
        server = next(turn) if len(stage.trainer.servers) > 1 else "t"
        rollouts = tuple(rollout(i, 1, SUCCESS[server], servers={server: 0}) for i in start.attempts)
        return GroupFinished(task_id=start.task_id, rollouts=rollouts, failures=())

    stage = Stage(answer, tests=tests, at_start=True, batch=1)
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 1}
    return stage


def result(stage: Stage) -> EvaluationDone | None:
    return next((message for message in stage.announced if isinstance(message, EvaluationDone)), None)


def test_evaluation_ends_when_the_servers_of_its_results_are_verified() -> None:
    stage = evaluating()
    stage.until(lambda: stage.loop._evaluator.awaits_check)
    assert result(stage) is None
    stage.trainer.verified = {"s": 1, "t": 1}
    stage.until(lambda: result(stage) is not None)
    done = result(stage)
    assert done is not None
    assert (done.success, done.num_rollouts) == (0.5, 4)
    assert len([start for start in stage.workers.started if start.evaluation]) == 4


@pytest.mark.parametrize("is_complete", [True, False], ids=["complete", "under-way"])
def test_results_of_a_server_that_misses_are_made_again(is_complete: bool) -> None:
    stage = evaluating(tests=4 if is_complete else 20)
    if is_complete:
        stage.until(lambda: stage.loop._evaluator.awaits_check)
    else:
        stage.until(lambda: (stage.loop._evaluator.progress or "0/20") not in ("0/20", "20/20"))
    stage.trainer.misses, stage.trainer.servers, stage.trainer.verified = [missed_probe("s", 1)], ("t",), {"t": 1}
    stage.until(lambda: result(stage) is not None)
    done = result(stage)
    assert done is not None
    assert (done.success, done.metrics["complete"]) == (0.0, 1.0)
    assert stage.loop._metrics.snapshot(1.0)["refused/s"] > 0


def test_evaluation_waits_ten_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.actor.publish_gate.CHECK_WAIT_S", 0.0)
    stage = evaluating()
    stage.until(lambda: result(stage) is not None)
    assert not stage.loop._evaluator.awaits_check
