"""What is compared with the peer: the recipe's own reward, and CPU seconds between two moments."""

import pytest

from benchmarks.peers import Child, summed_up
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


def test_ratio_is_the_median_of_seeds_and_null_where_a_side_misses_the_target() -> None:
    def run(seconds: float, reached_s: float | None) -> dict[str, dict[str, float | None]]:
        ours = {"step_s": 1.0, "training_s": 10.0, "to_success_s": 5.0}
        return {"ours": ours, "trl": {"step_s": seconds, "training_s": 20.0, "to_success_s": reached_s}}

    found = summed_up({"task": "quickstart"}, [run(2.0, 10.0), run(3.0, 15.0), run(7.0, None)])
    assert found["trl_over_ours"] == {"step_s": 3.0, "training_s": 2.0, "to_success_s": None}
