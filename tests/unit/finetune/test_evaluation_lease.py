"""While an evaluation runs no other version goes out."""

from typing import Any

import pytest

from pipelinerl.finetune.updates import EvaluationLease
from pipelinerl.records import EvaluationDone, EvaluationStarted


def started(version: int, deadline: float) -> EvaluationStarted:
    return EvaluationStarted(version=version, deadline=deadline)


def done(version: int) -> EvaluationDone:
    return EvaluationDone(version=version, success=0.0, reward=0.0, num_rollouts=1, metrics={})


@pytest.mark.parametrize(
    ("messages", "held"),
    [
        ([], False),
        ([started(1, 200.0)], True),
        ([started(1, 200.0), done(1)], False),
        ([started(1, 100.0)], False),
        ([started(1, 200.0), done(1), started(5, 150.0)], True),
        ([started(5, 150.0), done(1)], True),
        ([started(6, 150.0)], False),
    ],
)
def test_lease_on_version_6_is_held_by_another_evaluation_from_its_start_to_its_end_or_deadline(
    messages: list[Any], held: bool
) -> None:
    box = [messages, []]
    assert EvaluationLease(lambda: box.pop(0), clock=lambda: 100.0).held(6) is held
