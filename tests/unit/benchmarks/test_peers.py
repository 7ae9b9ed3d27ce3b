"""What is compared with the peer: the recipe's own reward, and CPU seconds between two moments."""

import pytest

from benchmarks.peers import Child
from benchmarks.peers_task import load_task


def test_words_are_rewarded_as_the_recipe_does_and_a_cut_answer_earns_nothing() -> None:
    task, problem = load_task("words", 0), {"dataset": "test", "topic": "rain", "length": 4}
    assert task.reward("Rain falls on roofs.", problem, True) == 1.0
    assert task.reward("Rain falls.", problem, True) == 0.25
    assert task.reward("Rain falls on roofs.", problem, False) == 0.0
    assert len(task.problems("test")) == 108


def test_cpu_seconds_between_two_moments_lie_between_the_samples() -> None:
    """The trainer takes half a core from second 10 on, all others a whole one."""
    child = Child(began=100.0, samples=[(110.0, 4.0, 2.0), (120.0, 9.0, 12.0), (130.0, 14.0, 22.0)])
    assert child.cpu_between(15.0, 25.0) == pytest.approx((5.0, 10.0))
    assert child.cpu_between(0.0, 99.0) == pytest.approx((10.0, 20.0))
