"""Which versions are encoded as differences."""

import pytest

from pipelinerl.weights.publish.versions import DeltaChoice

RETRY = 64


@pytest.mark.parametrize("mode", [True, False])
def test_mode_that_is_set_is_not_measured(mode: bool) -> None:
    choice = DeltaChoice(mode)
    choice.measured(0, 1.0, is_delta=mode)
    choice.measured(1, 9.0, is_delta=not mode)
    assert [choice.next() for _ in range(2 * RETRY)] == [mode] * 2 * RETRY


def taken(whole_s: float, delta_s: float, versions: int) -> list[bool]:
    choice, made = DeltaChoice("auto"), list[bool]()
    for version in range(versions):
        made.append(choice.next())
        warm_up_s = 100.0 if version == 0 else 0.0
        choice.measured(version, (delta_s if made[-1] else whole_s) + warm_up_s, is_delta=made[-1])
        choice.measured(version, 50.0, is_delta=made[-1])  # a slow server has it, too
        choice.measured(version - 1, 50.0, is_delta=False)  # and one the version before
    return made


def test_auto_measures_both_ways_and_takes_the_faster_one() -> None:
    assert taken(whole_s=2.0, delta_s=1.0, versions=6) == [False, False, True, True, True, True]
    assert taken(whole_s=1.0, delta_s=2.0, versions=6) == [False, False, True, False, False, False]


def test_auto_measures_the_slower_way_again_now_and_then() -> None:
    made = taken(whole_s=1.0, delta_s=2.0, versions=3 * RETRY)
    assert [version + 1 for version, is_delta in enumerate(made) if is_delta] == [3, RETRY, 2 * RETRY, 3 * RETRY]
