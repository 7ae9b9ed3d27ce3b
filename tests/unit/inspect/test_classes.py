"""Success parted into classes of difficulty and length, counted by hand."""

from pipelinerl.inspect.page.classes import by_difficulty, by_length
from pipelinerl.records import EvaluationDone


def done(version: int, *outcomes: tuple[int, int]) -> EvaluationDone:
    return EvaluationDone(
        version=version, success=0.5, reward=0.5, num_rollouts=8, metrics={}, outcomes={"test": outcomes}
    )


def test_difficulty_is_how_the_first_weights_did() -> None:
    """Two attempts each. Of the two problems never solved at first one is later, of four attempts two succeed."""
    evaluations = [done(40, (2, 2), (2, 0), (2, 1), (2, 2)), done(0, (2, 0), (2, 0), (2, 1), (2, 2))]
    (chart,) = by_difficulty(evaluations)
    assert [(line["label"], line["x"], line["y"]) for line in chart["lines"]] == [
        ("never solved at first", [0, 40], [0.0, 0.5]),
        ("sometimes", [0, 40], [0.5, 0.5]),
        ("always solved at first", [0, 40], [1.0, 1.0]),
    ]
    assert by_difficulty(evaluations[:1]) == []


def test_problem_without_a_result_at_first_is_in_no_class() -> None:
    (chart,) = by_difficulty([done(0, (0, 0), (1, 0)), done(8, (1, 1), (1, 0))])
    assert [(line["label"], line["y"]) for line in chart["lines"]] == [("never solved at first", [0.0, 0.0])]


def test_length_parts_attempts_into_thirds() -> None:
    """Steps 0 and 1, eight attempts of 10, 20 and 30 tokens each: the short ones all succeed, of the long ones half."""
    attempts = [
        (step, tokens, tokens == 10 or (tokens == 30 and n % 2 == 0))
        for step in (0, 1)
        for tokens in (10, 20, 30)
        for n in range(8)
    ]
    (chart,) = by_length(attempts)
    assert [(line["label"], line["x"], line["y"]) for line in chart["lines"]] == [
        ("up to 10 tokens", [0, 1], [1.0, 1.0]),
        ("11 … 20 tokens", [0, 1], [0.0, 0.0]),
        ("more than 20 tokens", [0, 1], [0.5, 0.5]),
    ]


def test_attempts_of_one_length_have_no_chart() -> None:
    assert by_length([(0, 4, True)] * 50) == []
    assert by_length([]) == []


def test_line_has_at_most_twenty_points_of_eight_attempts_or_more() -> None:
    """100 steps in buckets of five, ten attempts of a class each. Then buckets of three with eight and seven."""
    attempts = [(step, tokens, True) for step in range(100) for tokens in (10, 20, 30) for _ in range(2)]
    (chart,) = by_length(attempts)
    assert [len(line["x"]) for line in chart["lines"]] == [20, 20, 20]
    assert chart["lines"][0]["x"][:2] == [2, 7]
    few = [(step, tokens, True) for step, n in ((0, 8), (50, 7)) for tokens in (10, 20, 30) for _ in range(n)]
    (chart,) = by_length(few)
    assert [line["x"] for line in chart["lines"]] == [[1], [1], [1]]
