"""PipelineRL's own games, as an experiment that comes from there plays them."""

import pytest

from pipelinerl.domains.pipelinerl_games import counting, guessing
from pipelinerl.errors import DomainError

SYSTEM = "You are a helpful assistant"
QUESTION = (
    "You must guess a number between 1 and 1024. Output the answer as <answer>number</answer>."
    " After each guess I will tell you if your answer is higher or lower than the target number."
)
HIDDEN = {"answer": 700, "dataset": "train"}


def test_numbers_are_shuffled_by_a_factor_and_train_shares_none_with_test():
    train, test = ([p["answer"] for p in guessing.load_problems([name])] for name in ("train", "test"))
    assert train[:4] == [1, 383, 765, 123]  # 2 · 191 · i mod 1024, + 1
    assert test[:4] == [192, 574, 956, 314]  # 191 · (2 i + 1) mod 1024, + 1
    assert (sorted(train), sorted(test)) == (list(range(1, 1024, 2)), list(range(2, 1025, 2)))


@pytest.mark.parametrize(
    ("answers", "reward", "success", "broken"),
    [
        (["<answer>700</answer>"], 2.0, True, False),
        (["<answer>512</answer>", "so <answer>0700</answer> <answer>1</answer>"], 1.9, True, False),
        (["seven"], -2.0, False, True),
        (["<answer>512</answer>", "<answer>768</answer>", "<answer>-1</answer>"], -1.8, False, True),
        (["<answer>1</answer>"] * 13, 0.0, False, False),
        (["<answer>1</answer>"] * 12 + ["<answer>700</answer>"], 0.8, True, False),
    ],
)
async def test_rewards_of_the_guessing_game(play, answers, reward, success, broken):
    result, written = await play(guessing.generate_rollout, HIDDEN, answers)
    assert not written.answers, "at most 13 turns, and none after the end"
    assert [text.reward for text in result.training_texts] == pytest.approx([reward] * len(answers))
    assert (result.metrics.success, result.metrics.no_error, result.metrics.no_answer) == (success, not broken, broken)
    assert (result.rewards, result.domain) == ("texts", "guessing")


def test_every_turn_asks_anew_with_the_guesses_so_far():
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    assert guessing.messages([], 700) == first
    said = (
        "Your 2 previous guesses:\n512, which is lower than the target number."
        "\n768, which is higher than the target number.\n<wrong output>"
    )
    assert guessing.messages([512, 768], 700) == [*first, {"role": "user", "content": said}]


def test_words_are_pipelinerls_and_counted_by_case():
    train, test = (counting.load_problems([f"{name}_counting_problems"]) for name in ("train", "test"))
    assert (len(train), len(test)) == (1000, 1000)
    named = {"dataset": "train_counting_problems", "domain": "counting"}
    assert train[:3] == [
        {"word": "Cathlene", "letter": "n", "count": 1, **named},
        {"word": "twazzy", "letter": "z", "count": 2, **named},
        {"word": "uninterlinked", "letter": "n", "count": 3, **named},
    ]
    assert all(problem["count"] >= 1 for problem in [*train, *test])


@pytest.mark.parametrize(
    ("answer", "reward", "no_answer"),
    [
        ("<answer>2</answer>", 1.0, False),
        ("<answer>3</answer><answer>2</answer>", 0.0, False),
        ("<answer> 2 </answer>", 0.0, True),
        ("", 0.0, True),
    ],
)
async def test_rewards_of_counting(play, answer, reward, no_answer):
    problem = {"word": "twazzy", "letter": "z", "count": 2, "dataset": "train_counting_problems"}
    result, written = await play(counting.generate_rollout, problem, [answer])
    assert "How many z's are there in the word 'twazzy'? You can think step by step." in written.prompts[0]
    assert SYSTEM in written.prompts[0]
    assert (result.metrics.reward, result.metrics.no_answer) == (reward, no_answer)


@pytest.mark.parametrize("game", [guessing, counting])
def test_other_data_sets_are_refused_by_name(game):
    with pytest.raises(DomainError, match="no data set 'mine'"):
        game.load_problems(["mine"])
