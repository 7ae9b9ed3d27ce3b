import re

import numpy as np
import pytest

from pipelinerl.domains.guessing import final_reward, generate_guessing_rollout, load_problems, parse_guess
from pipelinerl.errors import DomainError
from tests.says import says

PROBLEM = {"dataset": "test", "answer": 5, "max_number": 8, "max_turns": 3}


@pytest.mark.parametrize(
    ("answers", "reward", "outcome", "turns"),
    [
        (["<answer>5</answer>"], 2.0, "hit", 1),
        (["<answer>4</answer>", "I say <answer>5</answer>"], 1.9, "hit", 2),
        (["<answer>4</answer>", "<answer>6</answer>", "<answer>5</answer>"], 1.8, "hit", 3),
        (["<answer>4</answer>", "<answer>6</answer>", "<answer>7</answer>"], 0.0, "missed", 3),
        (["five"], -2.0, "broken", 1),
        (["<answer>4</answer>", "<answer>-5</answer>"], -1.9, "broken", 2),
    ],
)
async def test_game_rewards_early_hits_and_punishes_early_format_errors(play, answers, reward, outcome, turns):
    result, _ = await play(generate_guessing_rollout, PROBLEM, answers)
    assert result.metrics.reward == pytest.approx(reward)
    assert [text.reward for text in result.training_texts] == pytest.approx([reward] * turns)
    assert result.metrics.success == (outcome == "hit")
    assert result.metrics.no_error == (outcome != "broken")
    assert result.metrics.num_guesses == turns


async def test_player_hears_where_the_number_lies(play):
    _, transport = await play(generate_guessing_rollout, PROBLEM, ["<answer>4</answer>", "<answer>6</answer>", "x"])
    assert re.search(says("higher", 4), transport.prompts[1])
    assert re.search(says("lower", 6), transport.prompts[2])


async def test_turns_extend_each_other_token_by_token(play):
    result, _ = await play(generate_guessing_rollout, PROBLEM, ["<answer>4</answer>", "<answer>5</answer>"])
    first, second = (np.array(text.input_ids) for text in result.training_texts)
    assert np.array_equal(second[: len(first)], first)


async def test_answer_cut_by_the_token_limit_is_a_broken_format_even_with_a_guess_in_it(play):
    problem, hit = PROBLEM | {"max_turns": 1}, "<answer>5</answer>"
    within, _ = await play(generate_guessing_rollout, problem, [hit], max_tokens=len(hit) + 1)  # with the end token
    beyond, _ = await play(generate_guessing_rollout, problem, [f"{hit} and so on"], max_tokens=len(hit) + 1)
    assert within.metrics.reward == pytest.approx(2.0)
    assert beyond.metrics.reward == pytest.approx(-2.0)
    assert not beyond.metrics.no_error


def test_guess_of_many_digits_is_no_guess():
    assert parse_guess(f"<answer>{'1' * 5000}</answer>") is None
    assert parse_guess("<answer>०५</answer>") is None
    assert parse_guess("<answer>007</answer>") == 7


def test_thirteenth_guess_of_the_readme_game_is_worth_0_8():
    assert final_reward(12, "hit") == pytest.approx(0.8)
    assert final_reward(12, "broken") == pytest.approx(-0.8)


def test_large_games_keep_numbers_for_the_test():
    train = {problem["answer"] for problem in load_problems(["train"])}
    test = {problem["answer"] for problem in load_problems(["test"])}
    assert not train & test
    assert len(train) == 768
    assert len(test) == 256
    assert {number % 4 for number in test} == {number % 4 for number in train} == {0, 1, 2, 3}


def test_small_games_test_on_every_number():
    problems = load_problems(["test"], max_number=8, max_turns=3, num_test_problems=16)
    assert sorted(problem["answer"] for problem in problems) == sorted([*range(1, 9)] * 2)
    assert {problem["max_turns"] for problem in problems} == {3}


def test_game_of_up_to_64_numbers_holds_none_out():
    assert [len(load_problems(["train"], max_number=size)) for size in (64, 65)] == [64, 49]


def test_unknown_dataset_is_named():
    with pytest.raises(DomainError, match="'dev'"):
        load_problems(["dev"])
