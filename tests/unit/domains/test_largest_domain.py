import pytest

from pipelinerl.domains.largest import generate_rollout, load_problems, score
from pipelinerl.errors import DomainError

PROBLEM = {"dataset": "train", "question": "Which is the largest of 18, 5 and 30?", "answer": 30}


@pytest.mark.parametrize(
    ("text", "reward", "success", "well_formed"),
    [
        ("<answer>30</answer>", 1, True, True),
        (" <answer>30</answer>\n", 1, True, True),
        ("<answer>18</answer>", 0, False, True),
        ("30", -1, False, False),
        ("<answer>30", -1, False, False),
        ("<answer>30</answer> surely", -1, False, False),
        ("<answer>٣٠</answer>", -1, False, False),
        ("", -1, False, False),
    ],
)
def test_score_of_a_completion_is_right_wrong_or_broken(text, reward, success, well_formed):
    metrics = score(text, 30)
    assert (metrics.reward, metrics.success) == (reward, success)
    assert (metrics.no_error, metrics.no_answer) == (well_formed, not well_formed)


def test_score_of_a_million_digits_is_a_broken_format_not_an_exception():
    assert score(f"<answer>{'9' * 1_000_000}</answer>", 30).reward == -1


async def test_rollout_gives_one_text_with_the_reward(play):
    result, transport = await play(generate_rollout, PROBLEM, ["<answer>30</answer>"])
    assert [text.reward for text in result.training_texts] == [1]
    assert result.metrics.reward == 1
    assert result.dataset_name == "train"
    assert PROBLEM["question"] in transport.prompts[0]


def test_train_and_test_share_no_triple_in_any_order():
    def triples(name):
        return {
            tuple(sorted(int(w.strip(",?")) for w in p["question"].split() if w.strip(",?").isdigit()))
            for p in load_problems([name], max_number=30, num_test_problems=10_000)
        }

    train, test = triples("train"), triples("test")
    assert not train & test
    assert len(train) + len(test) == 30 * 29 * 28 // 6
    assert all(sum(numbers) % 5 == 0 for numbers in test)
    assert all(sum(numbers) % 5 for numbers in train), "every fifth sum is held out"


def test_test_problems_are_always_the_same():
    assert load_problems(["test"]) == load_problems(["test"])
    assert len(load_problems(["test"])) == 512


def test_unknown_dataset_is_named():
    with pytest.raises(DomainError, match="'validation'"):
        load_problems(["validation"])
