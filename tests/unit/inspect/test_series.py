"""Columns of a run's metrics: points that lack a metric, metrics by domain, and a file that begins again."""

from statistics import median

from pipelinerl.inspect.series import Crossing, Series, beyond
from pipelinerl.observability.catalogue import TIME, ActorMetric, TrainerMetric


def test_of_gives_the_points_that_have_every_metric() -> None:
    series = Series(
        finetune=[
            {"step": 1, "time": 10.0, "entropy": 0.5},
            {"step": 2, "time": 11.0, "entropy": None, "ess": 0.75},
            {"step": 3, "time": 12.0, "entropy": 0.25, "ess": 1},
        ]
    )
    assert series.of(TrainerMetric.ENTROPY, TIME) == ([1, 3], [0.5, 0.25], [10.0, 12.0])
    assert series.of(TrainerMetric.ENTROPY, TrainerMetric.ESS) == ([3], [0.25], [1.0])
    assert series.of(TrainerMetric.ENTROPY, fewest=3) == ([], [])
    assert series.of(TrainerMetric.LAG_MAX, TrainerMetric.ESS) == ([], [], [])
    assert series.of(ActorMetric.REWARD) == ([], []), "a role that has logged nothing"


def test_points_are_added_after_a_look_and_forgotten_when_a_file_begins_again() -> None:
    series = Series(actor=[{"step": 1, "reward": 0.5}])
    assert series.of(ActorMetric.REWARD) == ([1], [0.5])
    series.add("actor", [{"step": 2}, {"step": 3, "reward": 0.75}])
    assert series.of(ActorMetric.REWARD) == ([1, 3], [0.5, 0.75])
    assert series.num_points("actor") == 3
    series.clear("actor")
    series.add("actor", [{"step": 1, "reward": 1.0}])
    assert series.of(ActorMetric.REWARD) == ([1], [1.0])


def test_a_bounded_series_keeps_the_first_points_and_the_newest_half() -> None:
    """`lag_max` ends with step 150, `ess` begins with step 180."""
    series, whole = Series(200), Series()
    for step in range(1, 402):
        point = {"step": step, "entropy": step / 2} | ({"lag_max": step} if step <= 150 else {})
        for one in (series, whole):
            one.add("finetune", [point | ({"ess": step} if step >= 180 else {})])
    # 201 points: those of steps 65 to 101 go. 201 again with step 238, 275, 312, 349 and 386: 37 go each time.
    kept = [*range(1, 65), *range(287, 402)]
    assert series.num_points("finetune") == len(kept)
    assert series.of(TrainerMetric.ENTROPY) == (kept, [step / 2 for step in kept])
    assert series.of(TrainerMetric.ESS) == (kept[64:], [float(step) for step in kept[64:]])
    assert series.of(TrainerMetric.LAG_MAX) == (kept[:64], [float(step) for step in kept[:64]])
    assert whole.num_points("finetune") == 401


def test_parts_are_told_apart_by_the_text_in_the_name() -> None:
    series = Series(actor=[{"step": 4, "loop_blocked_s/math": 2.0}, {"step": 5, "loop_blocked_s/code": 1.0}])
    assert series.parts(ActorMetric.LOOP_BLOCKED_S) == {"math": ([4], [2.0]), "code": ([5], [1.0])}


def test_beyond_asks_the_newest_eight_values_and_names_the_first_step_above() -> None:
    steps, values = list(range(10)), [0.0, 5.0, *[1.0] * 7, 3.0]
    assert beyond(steps, values, 1.2) == Crossing(1.25, 1), "the mean of seven ones and a three"
    assert beyond(steps, values, 1.25) is None
    assert beyond(steps, values, 0.5, typical=median) == Crossing(1.0, 1)
    assert beyond([], [], -1.0) is None
