import statistics

import pytest

from pipelinerl.domains.laps import ANTICLOCKWISE, CLOCKWISE, judge, load_problems, question, walk

TOKENS_PER_LAP = 48
"""44 stations, "lap", its number, a colon and the end of the line."""

UP = "lap 2: 1 2 3 4 0\nlap 1: 1 2 3 4 0\ndone"
DOWN = "lap 2: 4 3 2 1 0\nlap 1: 4 3 2 1 0\ndone"
PROBLEM = {"num_stations": 5, "laps": 2, "walker": "Ada"}


def test_walk_written_out_either_way_round():
    assert walk(5, 2, CLOCKWISE) == UP
    assert walk(5, 2, ANTICLOCKWISE) == DOWN


@pytest.mark.parametrize(
    ("output", "status", "score"),
    [
        (UP, "correct", 1.0),
        (DOWN, "wrong", 0.0),
        (UP.replace("3 4", "4 3"), "unparsable", 0.0),
        (UP.removesuffix("done"), "unparsable", 0.0),
        (UP + "\n", "unparsable", 0.0),
        (walk(5, 1, CLOCKWISE), "unparsable", 0.0),
        (UP.removesuffix("done") + DOWN, "unparsable", 0.0),
        (UP.partition("\n")[2], "unparsable", 0.0),
        ("", "unparsable", 0.0),
    ],
)
def test_only_the_whole_walk_clockwise_is_correct(output, status, score):
    verdict = judge(output, PROBLEM)
    assert (verdict.status, verdict.score) == (status, score)


def test_answers_have_a_median_of_300_tokens_and_a_heavy_tail():
    lengths = sorted(TOKENS_PER_LAP * problem["laps"] for problem in load_problems(["train"]))
    assert statistics.median(lengths) >= 300
    assert lengths[int(0.99 * len(lengths))] >= 2000
    assert lengths[-1] == TOKENS_PER_LAP * 50
    assert max(problem["laps"] for problem in load_problems(["test"])) == 20


def test_train_and_test_share_no_question():
    asked = {part: {question(p["laps"], p["walker"]) for p in load_problems([part])} for part in ("train", "test")}
    assert not asked["train"] & asked["test"]
    assert len(asked["test"]) > 15
