"""Tasks of reasoning-gym, with the library."""

import pytest

from pipelinerl.domains.libraries import reasoning_gym
from pipelinerl.domains.libraries.reasoning_gym import entries_of, generate_rollout, judge, load_problems
from pipelinerl.errors import DomainError
from pipelinerl.testing import run_rollout
from tests.says import says

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -0.5, "unfinished": None}
TASKS = {"leg_counting": {"max_animals": 3}, "basic_arithmetic": {}}


def test_problems_are_of_every_task_and_no_question_is_in_both_parts():
    train = load_problems(["train"], TASKS, num_train_problems=41)
    test = load_problems(["test"], TASKS, num_test_problems=20, seed=7)
    assert [sum(p["name"] == name for p in train) for name in TASKS] == [21, 20]
    assert len({p["task"] for p in [*train, *test]}) == 61
    assert train == load_problems(["train"], TASKS, num_train_problems=41)
    assert test == load_problems(["test"], TASKS, num_test_problems=20, seed=8)
    assert train != load_problems(["train"], TASKS, num_train_problems=41, seed=1)


def test_task_with_few_questions_ends():
    problems = load_problems(["train"], {"coin_flip": {"min_trials": 3, "max_trials": 5}}, num_train_problems=10**6)
    assert 0 < len(problems) < 100


def test_unknown_task_and_setting_are_refused():
    with pytest.raises(DomainError, match=says("task 'legs'", "not registered")):
        load_problems(["train"], {"legs": {}})
    with pytest.raises(DomainError, match=says("arms", "leg_counting")):
        load_problems(["train"], {"leg_counting": {"arms": 2}})
    with pytest.raises(DomainError, match=says("no dataset 'dev'")):
        load_problems(["dev"], TASKS)


async def test_rollout_is_rewarded_by_the_tasks_own_score(monkeypatch):
    (problem,) = load_problems(["train"], {"leg_counting": {}}, num_train_problems=1)
    answer = entries_of(problem["name"], problem["settings"])[problem["index"]]["answer"]
    cfg = {"rewards": REWARDS}
    replies = {f"so <answer> {answer} </answer>": 1.0, "<answer>-1</answer>": 0.0, answer: -1.0}
    for reply, reward in replies.items():
        result = await run_rollout(generate_rollout, problem, [reply], cfg)
        assert (result.metrics.reward, result.metrics.success) == (reward, reward == 1.0)
    entries = entries_of(problem["name"], problem["settings"])
    monkeypatch.setattr(entries, "score_answer", lambda answer, entry: 0.25)
    assert (judge("<answer>x</answer>", problem).status, judge("<answer>x</answer>", problem).score) == ("wrong", 0.25)


def test_answer_that_makes_the_score_fail_is_unparsable(monkeypatch):
    (problem,) = load_problems(["train"], {"leg_counting": {}}, num_train_problems=1)

    class Broken:
        def __getitem__(self, index):
            return {}

        def score_answer(self, answer, entry):
            raise ZeroDivisionError

    monkeypatch.setattr(reasoning_gym, "entries_of", lambda task, settings: Broken())
    assert judge("<answer>1</answer>", problem).status == "unparsable"
