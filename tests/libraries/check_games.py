"""Games of textarena and environments of gymnasium, with the libraries."""

import asyncio
import random

import pytest

from pipelinerl.actor.failures import classify
from pipelinerl.domains.libraries import gymnasium, textarena
from pipelinerl.errors import DomainError
from pipelinerl.testing import run_rollout
from tests.says import says

GUESS = {"GuessTheNumber-v0": {"max_number": 4, "max_turns": 6}}
LAKE = {"FrozenLake-v1": {"is_slippery": False}}


def second_free_square(seen: str) -> str:
    return seen.rpartition("Available Moves:")[2].split("'")[3]


async def test_guessing_game_is_won_and_its_turns_are_one_growing_conversation():
    (problem,) = textarena.load_problems(["train"], GUESS, num_train_problems=1)
    result = await run_rollout(textarena.generate_rollout, problem, ["[1]", "[2]", "[3]", "[4]"])
    assert (result.metrics.reward, result.metrics.success) == (1.0, True)
    first, *later = result.training_texts
    assert all(text.input_ids[: len(first.input_ids)] == first.input_ids for text in later)
    assert later[0].prompt_text.count("The target number is higher.") == 1
    assert later[0].prompt_text.count("[1]") == 1


async def test_attempts_at_one_problem_begin_alike_and_leave_the_random_numbers_alone():
    game = lambda: textarena.TextArenaGame("GuessTheNumber-v0", {"max_number": 1000})  # noqa: E731
    games = [game() for _ in range(8)]
    before = random.getstate()
    await asyncio.gather(*(asyncio.to_thread(one.reset, seed=5) for one in games))
    assert random.getstate() == before
    assert len({one._game.state.game_state["game_number"] for one in games}) == 1


async def test_two_players_need_an_opponent_and_play_against_it():
    with pytest.raises(DomainError, match=says("num_players=2", "opponent")):
        textarena.load_problems(["train"], {"TicTacToe-v0": {}}, num_players=2)
    (problem,) = textarena.load_problems(
        ["train"],
        {"TicTacToe-v0": {}},
        num_players=2,
        opponent="tests.libraries.check_games.second_free_square",
        num_train_problems=1,
    )
    won = await run_rollout(textarena.generate_rollout, problem, ["[0]", "[3]", "[6]"])
    assert (won.metrics.reward, won.metrics.success) == (1.0, True)
    lost = await run_rollout(textarena.generate_rollout, problem, ["[0]", "x", "x"])
    assert (lost.metrics.reward, lost.metrics.success) == (-1.0, False)


async def test_lake_is_crossed_and_a_text_without_an_action_ends_it():
    (problem,) = gymnasium.load_problems(["train"], LAKE, num_train_problems=1)
    way = ["2", "2", "go 1", "1", "1", "2"]  # right, right, down, down, down, right
    result = await run_rollout(gymnasium.generate_rollout, problem, way)
    assert (result.metrics.reward, result.metrics.success, len(result.training_texts)) == (1.0, True, 6)
    for reply in ("right", "4", "-1"):
        result = await run_rollout(gymnasium.generate_rollout, problem, ["2", reply])
        assert (result.metrics.reward, result.metrics.success) == (-1.0, False)


async def test_space_that_no_text_names_and_unknown_environments_are_errors_of_the_domain():
    (problem,) = gymnasium.load_problems(["train"], {"Pendulum-v1": {}}, num_train_problems=1)
    with pytest.raises(DomainError, match=says("Box", "parse_action")):
        await run_rollout(gymnasium.generate_rollout, problem, ["1"])
    (problem,) = gymnasium.load_problems(["train"], {"NoSuchLake-v1": {}}, num_train_problems=1)
    with pytest.raises(Exception, match="NoSuchLake") as raised:
        await run_rollout(gymnasium.generate_rollout, problem, ["1"])
    assert classify(raised.value) == "domain_error"
