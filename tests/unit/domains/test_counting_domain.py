import pytest

from pipelinerl.domains.counting import generate_counting_rollout, load_problems
from pipelinerl.testing import run_rollout

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "unparsable": 0.0, "unfinished": None}


@pytest.mark.parametrize(
    ("reply", "reward", "no_answer"),
    [
        ("b-a-n-a-n-a <answer>3</answer>", 1, False),
        ("<answer>2</answer> or <answer>3</answer>", 1, False),
        ("<answer>2</answer>", 0, False),
        ("three", 0, True),
        ("<answer>" + "3" * 5000 + "</answer>", 0, True),
    ],
)
async def test_last_answer_counts(reply, reward, no_answer):
    problem = {"dataset": "test", "word": "banana", "letter": "a", "count": 3}
    result = await run_rollout(generate_counting_rollout, problem, [reply], {"rewards": REWARDS})
    assert (result.metrics.reward, result.metrics.no_answer) == (reward, no_answer)


def test_problems_count_right_and_words_are_not_shared():
    train, test = load_problems(["train"], num_train_problems=500), load_problems(["test"])
    assert all(problem["word"].count(problem["letter"]) == problem["count"] for problem in train + test)
    assert not {problem["word"] for problem in train} & {problem["word"] for problem in test}
    assert len({problem["count"] for problem in train}) >= 4
