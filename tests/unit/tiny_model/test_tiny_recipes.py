import re
from random import Random

import pytest

from pipelinerl.domains.countdown import load_problems as load_countdown
from pipelinerl.domains.countdown.judge import judge
from pipelinerl.domains.laps import is_test_walk, walk
from pipelinerl.domains.largest import load_problems
from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model.recipes import make_recipe


def draw(recipe: str, count: int, **params: object) -> list[list[dict[str, str]]]:
    rng = Random(0)
    conversation = make_recipe(recipe, params).conversation
    return [conversation(rng) for _ in range(count)]


def answer_of(message: dict[str, str]) -> int:
    return int(message["content"].removeprefix("<answer>").removesuffix("</answer>"))


def test_largest_warm_up_never_shows_a_held_out_triple():
    held_out = {problem["question"] for problem in load_problems(["test"], num_test_problems=10_000)}
    shown = {conversation[0]["content"] for conversation in draw("largest", 5_000)}
    assert not shown & held_out


def test_largest_warm_up_answers_at_chance():
    right = 0
    for question, answer in draw("largest", 5_000):
        numbers = [int(word.strip(",?")) for word in question["content"].split() if word.strip(",?").isdigit()]
        assert answer_of(answer) in numbers
        right += answer_of(answer) == max(numbers)
    assert right / 5_000 == pytest.approx(1 / 3, abs=0.02)  # 3 standard errors


def test_guessing_warm_up_shows_what_higher_means_but_has_no_target():
    turns = 0
    for conversation in draw("guessing", 2_000):
        for question, answer in zip(conversation[2::2], conversation[3::2], strict=True):
            relation, bound = question["content"].removeprefix("The number is ").rstrip(".").split(" than ")
            assert answer_of(answer) > int(bound) if relation == "higher" else answer_of(answer) < int(bound)
            assert 1 <= answer_of(answer) <= 8
            turns += 1
        bounds = [int(m["content"].rstrip(".").split()[-1]) for m in conversation[2::2]]
        guesses = [answer_of(m) for m in conversation[1::2]]
        if bounds and bounds[0] != guesses[0]:
            turns += 1_000_000
    assert turns > 1_000_000, "bounds are the player's own guesses: that would be the game"


def test_unknown_recipe_and_parameter_are_named():
    with pytest.raises(ConfigError, match=r"'poker'.*module\.function"):
        make_recipe("poker", {})
    with pytest.raises(ConfigError, match="no module 'poker'"):
        make_recipe("poker.warm_up", {})
    with pytest.raises(ConfigError, match="colour"):
        make_recipe("largest", {"colour": 1})


def test_countdown_warm_up_uses_the_numbers_shown_whatever_the_target_and_never_a_held_out_problem():
    right = 0
    held_out = {
        (tuple(sorted(p["numbers"])), p["target"])
        for p in load_countdown(["test"], num_numbers=(2, 2), max_number=20, operators="+-")
    }
    for question, answer in draw("countdown", 1_000):
        target, *numbers = (int(number) for number in re.findall(r"\d+", question["content"]))
        assert (tuple(sorted(numbers)), target) not in held_out
        verdict = judge(answer["content"], {"numbers": numbers, "target": target}, {})
        assert verdict.status in ("correct", "wrong")
        assert "uses" not in verdict.detail
        right += verdict.status == "correct"
    assert right / 1_000 == pytest.approx(3 / 8, abs=0.06), "a random sign in a random order"


def test_laps_warm_up_walks_either_way_round_and_shows_no_held_out_question():
    answered_right = 0
    for question, walked in draw("laps", 1_000, num_stations=18, max_laps=6):
        walker, laps = re.fullmatch(r"(\w+), walk (\d+) laps clockwise\.", question["content"]).groups()
        assert not is_test_walk(int(laps), walker)
        right, other = (walk(18, int(laps), step) for step in (1, -1))
        assert walked["content"] in (right, other)
        answered_right += walked["content"] == right
    assert answered_right / 1_000 == pytest.approx(0.5, abs=0.05)  # 3 standard errors
