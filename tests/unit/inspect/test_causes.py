"""Planted failures: the right cause comes first, and nothing is said about runs that learn."""

import pytest

from pipelinerl.inspect.alarms import History
from pipelinerl.inspect.causes import Attempt, Drift, Evidence, causes
from tests.planted_runs import FAULTS, Fault, play


@pytest.mark.parametrize("expected", FAULTS)
def test_planted_failure_is_the_first_cause(expected: str) -> None:
    found = causes(play(FAULTS[expected]))
    assert [cause.name for cause in found][:1] == [expected], [cause.line() for cause in found]


@pytest.mark.parametrize("seed", range(3))
def test_healthy_run_has_no_cause(seed: int) -> None:
    assert [cause.line() for cause in causes(play(Fault(), seed))] == []


@pytest.mark.parametrize(
    ("change", "apart", "found"),
    [
        (2.1e-10, 0.41, ["stale server"]),  # a real server that kept its weights of version 20
        (0.043, 0.017, []),  # a healthy one
        (0.0011, 8.3e-05, []),  # tokens that are nearly certain
        (0.0, 0.0, []),  # nothing is trained: nobody moves
    ],
)
def test_server_that_says_the_same_while_the_trainer_moves_is_stale(
    change: float, apart: float, found: list[str]
) -> None:
    drift = Drift(first=50, last=100, contexts=1156, change=change, apart=apart)
    assert [cause.name for cause in causes(Evidence(history=History(), drifts=[drift]))] == found


def test_a_policy_that_broke_is_not_too_hard_a_task() -> None:
    """Before training, a quarter of the attempts succeed: of eight, none does in (1 − .26)^8 = 9 % of the groups."""
    attempts = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=float(wins), success=float(wins))
        for n in range(1024)
        for wins in [n < 64 and n % 4 == 0]
    ]
    assert "too hard" not in [cause.name for cause in causes(Evidence(history=History(), attempts=attempts))]
    hopeless = [Attempt(group=f"{n // 8}", version=n // 64, reward=0.0, success=0.0) for n in range(1024)]
    assert "too hard" in [cause.name for cause in causes(Evidence(history=History(), attempts=hopeless))]


@pytest.mark.parametrize(("last_success", "found"), [(511, True), (300, False)])
def test_judge_is_down_only_where_success_ends_at_once(last_success: int, found: bool) -> None:
    """Half of the attempts succeed until all earn the same. A policy that failed 200 attempts earlier did so itself."""
    attempts = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=reward, success=float(n <= last_success and n % 2))
        for n in range(1024)
        for reward in [0.0 if n > 511 else float(n % 3)]
    ]
    names = [cause.name for cause in causes(Evidence(history=History(), attempts=attempts))]
    assert ("judge down" in names) is found
