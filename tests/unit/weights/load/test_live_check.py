"""Versions are compared as they become live, from the first question on, and each result is kept for its question."""

import threading
from collections.abc import Callable

import pytest

from pipelinerl.weights.load.live_check import LiveCheck
from pipelinerl.weights.protocol import WeightCheck
from tests.waiting import wait_until


def result(check: LiveCheck, version: int, compare: Callable[[], WeightCheck]) -> WeightCheck:
    wait_until(lambda: check.result(version, compare) is not None)
    found = check.result(version, compare)
    assert found is not None
    return found


def right() -> WeightCheck:
    return WeightCheck(is_checked=True)


def gone() -> WeightCheck:
    return WeightCheck(is_checked=False)


def wrong() -> WeightCheck:
    return WeightCheck(is_checked=True, differing=("embed",))


def test_nothing_is_compared_before_the_first_question() -> None:
    check = LiveCheck()
    check.is_live(0, wrong)
    assert result(check, 0, right).differing == ()


def test_fault_of_a_version_is_told_after_later_versions_became_live() -> None:
    check = LiveCheck()
    result(check, 0, right)
    for version in range(1, 5):
        check.is_live(version, wrong if version == 2 else right)
    assert [result(check, version, gone).differing for version in range(1, 5)] == [(), ("embed",), (), ()]
    assert all(result(check, version, gone).is_checked for version in range(5))


def test_version_that_became_live_once_more_is_compared_once_more() -> None:
    check = LiveCheck()
    result(check, 0, right)
    may_end = threading.Event()

    def late() -> WeightCheck:
        may_end.wait(60)
        return wrong()

    check.is_live(1, late)
    check.is_live(1, right)
    assert check.result(1, gone) is None
    may_end.set()
    assert result(check, 1, gone).differing == ()


def test_error_is_a_fault_and_old_versions_are_forgotten() -> None:
    check = LiveCheck()
    assert result(check, 0, lambda: 1 / 0).differing == ("the comparison failed: division by zero",)  # type: ignore[arg-type, return-value]
    for version in range(1, 2000):
        check.is_live(version, right)
    assert len(check._comparisons) == 32
    assert not result(check, 0, gone).is_checked


def test_version_whose_comparison_got_no_thread_is_compared_at_the_next_question(monkeypatch: pytest.MonkeyPatch):
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    check = LiveCheck()
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            check.result(1, wrong)
    assert result(check, 1, wrong).differing == ("embed",)
