"""Planted failures: the right cause comes first, and nothing is said about runs that learn."""

import pytest

from pipelinerl.inspect.causes import causes
from tests.planted_runs import FAULTS, Fault, play


@pytest.mark.parametrize("expected", FAULTS)
def test_planted_failure_is_the_first_cause(expected: str) -> None:
    found = causes(play(FAULTS[expected]))
    assert [cause.name for cause in found][:1] == [expected], [cause.line() for cause in found]


@pytest.mark.parametrize("seed", range(3))
def test_healthy_run_has_no_cause(seed: int) -> None:
    assert [cause.line() for cause in causes(play(Fault(), seed))] == []
