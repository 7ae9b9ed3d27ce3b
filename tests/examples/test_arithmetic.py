"""The recipes that imitate first: right solutions, held-out problems that no row shows, legal play."""

import re
from random import Random

from examples.arithmetic.arithmetic import (
    conversations,
    draw_story,
    judge,
    load_problems,
    solution,
    task,
)
from examples.guessing_smollm2.imitate import conversations as games
from pipelinerl.domains.guessing import numbers_of, parse_guess


def test_solution_computes_what_the_story_says() -> None:
    """Each sentence is computed anew from its own numbers."""
    for seed in range(200):
        question, steps = draw_story(Random(seed))
        first, *changes, _ = re.findall(r"[^.?]+[.?]", question)
        count = 1
        for number in re.findall(r"\d+", first):
            count *= int(number)
        for sentence in changes:
            change = int(re.findall(r"\d+", sentence)[0])
            count += change if re.search(r"finds|buys|brings", sentence) else -change
        assert judge(solution(steps), count).status == "correct"
        assert judge(solution(steps), count + 1).status == "wrong"
        assert len(steps) in (1, 2)
        assert count >= 0
        assert all(len(number) <= 2 for number in re.findall(r"\d+", question))


def test_judge_takes_the_last_answer_and_no_other_number() -> None:
    assert judge("The answer is 5. No, the answer is 7.", 7).status == "correct"
    assert judge("3 + 4 = 7.", 7).status == "no_answer"


def test_imitated_rows_hold_no_test_problem() -> None:
    held_out = {task(problem["question"]) for problem in load_problems(["test"])}
    assert len(held_out) > 250
    assert not held_out & {row["messages"][0]["content"] for row in conversations(400, seed=0)}


def test_imitated_games_guess_within_what_the_answers_leave() -> None:
    train = set(numbers_of("train", 128))
    for row in games(100, seed=0):
        low, high = 1, 128
        messages = row["messages"]
        assert len(messages) in range(2, 17, 2)
        for said, heard in zip(messages[1::2], [*messages[2::2], None], strict=True):
            guess = parse_guess(said["content"])
            assert guess in range(low, high + 1)
            if heard and "higher" in heard["content"]:
                low = guess + 1
            elif heard:
                high = guess - 1
        assert train & set(range(low, high + 1))
