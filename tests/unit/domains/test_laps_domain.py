import statistics

import pytest

from pipelinerl.domains.laps.dataset import direction, load_problems, question, walk
from pipelinerl.domains.laps.rollouts import judge

TOKENS_PER_LAP = 48
"""44 stations, "lap", its number, a colon and the end of the line."""

UP = "to 2 up\nlap 2: 1 2 3 4 0\nlap 1: 1 2 3 4 0\ndone"
DOWN = "to 2 down\nlap 2: 4 3 2 1 0\nlap 1: 4 3 2 1 0\ndone"
PROBLEM = {"num_stations": 5, "laps": 2, "station": 2}


def test_walk_written_out_upwards_and_downwards():
    assert walk(5, 2, 2, 1) == UP
    assert walk(5, 2, 2, -1) == DOWN


@pytest.mark.parametrize(("station", "expected"), [(1, 1), (2, 1), (3, -1), (4, -1)])
def test_direction_is_the_one_that_comes_early_to_the_station(station, expected):
    assert direction(5, station) == expected
    first_lap = walk(5, 1, station, expected).splitlines()[1].removeprefix("lap 1: ").split()
    assert first_lap.index(str(station)) < len(first_lap) / 2


@pytest.mark.parametrize(
    ("output", "status", "score"),
    [
        (UP, "correct", 1.0),
        (DOWN, "wrong", 0.0),
        (UP.replace("3 4", "4 3"), "unparsable", 0.0),
        (UP.removesuffix("done"), "unparsable", 0.0),
        (UP + "\n", "unparsable", 0.0),
        (walk(5, 1, 2, 1), "unparsable", 0.0),
        (walk(5, 2, 3, 1), "unparsable", 0.0),
        (UP.removesuffix("done") + DOWN, "unparsable", 0.0),
        (UP.replace("up", "down"), "unparsable", 0.0),
        ("", "unparsable", 0.0),
    ],
)
def test_only_the_whole_walk_in_the_right_direction_is_correct(output, status, score):
    verdict = judge(output, PROBLEM)
    assert (verdict.status, verdict.score) == (status, score)


def test_answers_have_a_median_of_300_tokens_and_a_heavy_tail():
    lengths = sorted(TOKENS_PER_LAP * problem["laps"] for problem in load_problems(["train"]))
    assert statistics.median(lengths) >= 300
    assert lengths[int(0.99 * len(lengths))] >= 2000
    assert lengths[-1] == TOKENS_PER_LAP * 50


def test_train_and_test_share_no_question():
    asked = {part: {question(p["laps"], p["station"]) for p in load_problems([part])} for part in ("train", "test")}
    assert not asked["train"] & asked["test"]
    assert len(asked["test"]) > 15


def test_half_of_the_answers_are_upwards():
    problems = load_problems(["train"])
    upwards = sum(direction(problem["num_stations"], problem["station"]) == 1 for problem in problems)
    assert upwards / len(problems) == pytest.approx(0.5, abs=0.025)  # 3 standard errors
