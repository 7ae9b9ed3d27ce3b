"""Reward functions of others: called unchanged, in both forms, and a failure is never a reward."""

import json
from collections import Counter

import aiohttp
import httpx
import openai
import pytest
import requests

from pipelinerl.config.load import compose, parse
from pipelinerl.config.reward_functions import verifier_of
from pipelinerl.config.rules import check_rules
from pipelinerl.domains import reward_function, verifier_client
from pipelinerl.domains.reward_forms import Answered, arguments, form_of
from pipelinerl.domains.reward_function import generate_rollout, load_problems, may_pass
from pipelinerl.domains.verifier_client import IN_PROCESS
from pipelinerl.errors import ConfigError, DomainError, ServerError, VerifierError
from pipelinerl.records.verdicts import Verdict
from pipelinerl.testing import run_rollout
from tests import brought_rewards
from tests.brought_rewards import BusyError, Longer
from tests.says import says

MESSAGES = [{"role": "user", "content": "What is 6 × 7?"}]
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": MESSAGES,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 7},
}


@pytest.fixture(autouse=True)
def clients_of_this_test(monkeypatch):
    monkeypatch.setattr(verifier_client, "_clients", {})


def cfg(function, **keys):
    names = function if not isinstance(function, str) else f"tests.brought_rewards.{function}"
    return {"reward_function": names, "jobs": [{"kind": "verifier", "url": IN_PROCESS}], **keys}


async def metrics_of(tmp_path, function, row, reply, **keys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (problem,) = load_problems([str(tmp_path / "rows.jsonl")])
    result = await run_rollout(generate_rollout, problem, [reply], cfg(function, **keys))
    assert result.training_texts[0].reward == result.metrics.reward
    return result.metrics.model_dump()


@pytest.mark.parametrize(
    ("function", "reply", "reward", "success"),
    [
        ("gsm8k_score", "so #### 42", 1.0, True),
        ("gsm8k_score", "so #### 41", 0.0, False),
        ("gsm8k_score", "", 0.0, False),
        ("dapo_score", "Answer: 42", 1.0, True),
        ("dapo_score", "Answer: 41", -1.0, False),
        ("my_reward_fn", "a" * 25, 0.25, True),
        ("prime_score", "It is 42.", 1.0, True),
        ("seen_by_verl", "#### 42", 1.0, True),
        ("asked_elsewhere", "42", 1.0, True),
    ],
)
async def test_function_of_verl_is_called_unchanged(tmp_path, function, reply, reward, success):
    metrics = await metrics_of(tmp_path, function, VERL, reply)
    assert (metrics["reward"], metrics["success"], metrics["no_answer"]) == (reward, success, not reply)
    assert metrics[function] == reward
    assert metrics["reward_s"] >= 0


async def test_other_numbers_of_verls_dict_are_metrics_and_texts_are_not(tmp_path):
    metrics = await metrics_of(tmp_path, "dapo_score", VERL, "Answer: 42")
    assert metrics["dapo_score_acc"] == 1.0
    assert "dapo_score_pred" not in metrics
    metrics = await metrics_of(tmp_path, "numpy_score", VERL, "")
    assert (metrics["reward"], metrics["numpy_score_acc"], metrics["numpy_score_tokens"]) == (0.5, 0.25, 3.0)


@pytest.mark.parametrize(
    ("function", "row", "reply", "reward"),
    [
        ("reward_len", {"prompt": "?"}, "abc", -2.0),
        ("reward_ids", {"prompt": "?"}, "abc", 4.0),  # three bytes and the end token
        ("longer", {"prompt": "?", "solution": "12345678"}, "abc", 0.5),
        ("format_reward_func", {"prompt": MESSAGES}, "<think>x</think><answer>y</answer>", 1.0),
        ("format_reward_func", {"prompt": MESSAGES}, "y", 0.0),
        ("reward_func", {"prompt": "?", "ground_truth": "42"}, "\\boxed{42}", 1.0),
        ("slow_reward", {"prompt": "?"}, "", 0.25),
    ],
)
async def test_function_of_trl_is_called_unchanged(tmp_path, function, row, reply, reward):
    assert (await metrics_of(tmp_path, function, row, reply))["reward"] == reward


BY_KIND = {"tests.brought_rewards.math_reward_func": 2.0, "tests.brought_rewards.coding_reward_func": 4.0}


async def test_function_that_returns_none_counts_nothing_and_has_no_metric(tmp_path):
    math = await metrics_of(tmp_path, BY_KIND, {"prompt": "?", "task": "math"}, "4")
    coding = await metrics_of(tmp_path, BY_KIND, {"prompt": "?", "task": "coding"}, "4")
    assert (math["reward"], math["math_reward_func"]) == (2.0, 1.0)
    assert (coding["reward"], coding["coding_reward_func"]) == (2.0, 0.5)
    assert "coding_reward_func" not in math
    assert coding["success"] is True  # of the first that applies
    with pytest.raises(DomainError, match="no reward function applies"):
        await metrics_of(tmp_path, BY_KIND, {"prompt": "?", "task": "poetry"}, "4")


async def test_rewards_that_are_compared_on_their_own_have_their_weights_from_there_and_always_a_value(tmp_path):
    named = {"finetune": {"rl": {"reward_weights": {"math_reward_func": 3.0, "coding_reward_func": 1.0}}}}
    metrics = await metrics_of(tmp_path, BY_KIND, {"prompt": "?", "task": "math"}, "4", **named)
    assert (metrics["reward"], metrics["math_reward_func"], metrics["coding_reward_func"]) == (3.0, 1.0, 0.0)


async def test_function_and_shipped_judge_are_combined(tmp_path, monkeypatch):
    class Helpful:
        async def check(self, session, question, answer, reference):
            assert (question, answer, reference) == (MESSAGES, "It is \\boxed{42}.", "42")
            return Verdict(status="wrong", score=0.5)

    monkeypatch.setattr(reward_function, "judge_of", lambda cfg, name: {"helpful": Helpful()}[name])
    three = {"math": 1.0, "helpful": 0.2, "tests.brought_rewards.my_reward_fn": 10.0}
    metrics = await metrics_of(tmp_path, three, VERL, "<think>6 × 7</think>It is \\boxed{42}.")
    assert (metrics["math"], metrics["helpful"], metrics["my_reward_fn"]) == (1.0, 0.5, 0.37)
    assert metrics["reward"] == pytest.approx(1.0 + 0.1 + 3.7, abs=1e-12)


@pytest.mark.parametrize("kind", ["verl", "trl"])
async def test_kind_decides_where_names_do_not(tmp_path, kind):
    assert (await metrics_of(tmp_path, "anything", VERL, "x", reward_function_kind=kind))["reward"] == 1.0


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("anything", ("neither", "compute_score(data_source", "reward_func(prompts", "`reward_function_kind`")),
        ("of_both", ("both forms", "solution_str, completions")),
        ("compute_score_batched", ("neither", "data_sources, solution_strs")),
        ("needs_more", ("'reward_router_address'", "extra_info")),
        ("reward_func", ("'ground_truth'", "prompts")),  # no such column
        ("Longer", ("a class", "instance")),
        ("ends_the_process", ("SystemExit: no key", "brought_rewards.py")),
        ("raises", ("ValueError: no such key", "brought_rewards.py")),
        ("says_nan", ("the score is nan", "finite number")),
        ("says_text", ("the score is '1'", "finite number")),
        ("says_number", ("returned 1.0 for one completion", "list of numbers")),
        ("without_score", ("dict with ['acc']", "'score'")),
        ("nowhere", ("`tests.brought_rewards.nowhere` does not exist",)),
    ],
)
async def test_function_that_cannot_reward_is_an_error_that_names_it(tmp_path, function, words):
    with pytest.raises(DomainError, match=says("reward_function", f"tests.brought_rewards.{function}", *words)):
        await metrics_of(tmp_path, function, {"prompt": "?"}, "x")


async def test_async_function_has_a_limit(tmp_path):
    with pytest.raises(VerifierError, match=says("never_ends", "0.01 s", "`reward_function_timeout_s`")):
        await metrics_of(tmp_path, "never_ends", {"prompt": "?"}, "x", reward_function_timeout_s=0.01)


async def test_async_function_is_called_again_after_errors_that_may_pass_within_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_function, "FIRST_DELAY_S", 1e-6)
    busy = [BusyError(503), ConnectionResetError(), TimeoutError(), aiohttp.ServerDisconnectedError(), BusyError(429)]
    brought_rewards.FAILURES[:] = busy
    assert (await metrics_of(tmp_path, "asks_service", {"prompt": "?"}, "x"))["reward"] == 0.5
    monkeypatch.setattr(reward_function, "FIRST_DELAY_S", 60.0)
    brought_rewards.FAILURES[:] = [BusyError(503)]
    with pytest.raises(VerifierError, match=says("asks_service", "0.01 s", "BusyError: status 503")):
        await metrics_of(tmp_path, "asks_service", {"prompt": "?"}, "x", reward_function_timeout_s=0.01)


async def test_async_function_is_not_called_again_after_an_error_of_its_own(tmp_path):
    brought_rewards.FAILURES[:] = [BusyError(401), ValueError("unused")]
    with pytest.raises(BusyError, match="401"):
        await metrics_of(tmp_path, "asks_service", {"prompt": "?"}, "x")
    assert len(brought_rewards.FAILURES) == 1


async def test_calls_of_an_async_function_have_a_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_function, "_num_calls", Counter())
    monkeypatch.setattr(reward_function, "FIRST_DELAY_S", 1e-6)
    brought_rewards.FAILURES[:] = [BusyError(503)]
    budget = {"reward_function_max_calls": 2}
    assert (await metrics_of(tmp_path, "asks_service", {"prompt": "?"}, "x", **budget))["reward"] == 0.5
    with pytest.raises(DomainError, match=says("asks_service", "2 times", "`reward_function_max_calls`")):
        await metrics_of(tmp_path, "asks_service", {"prompt": "?"}, "x", **budget)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (httpx.ReadTimeout("slow"), True),
        (httpx.HTTPStatusError("", request=None, response=httpx.Response(502)), True),
        (httpx.HTTPStatusError("", request=None, response=httpx.Response(404)), False),
        (requests.ConnectionError(), True),
        (requests.exceptions.ReadTimeout(), True),
        (requests.HTTPError(response=None), False),
        (openai.APIConnectionError(request=httpx.Request("GET", "http://a")), True),
        (ServerError("", 500), True),
        (ServerError("", 400), False),
        (KeyError("score"), False),
    ],
)
def test_errors_that_may_pass_are_known_by_status_or_class(error, passes):
    assert may_pass(error) is passes


def test_instance_gets_the_arguments_of_its_call():
    answered = Answered(task="?", output="a", completion_ids=[1, 2], columns={"solution": "s", "prompt": "?"})
    assert form_of("m.longer", Longer(), "auto") == "trl"
    assert arguments("m.longer", Longer(), "trl", answered) == {
        "prompts": ["?"],
        "completions": ["a"],
        "completion_ids": [[1, 2]],
        "solution": ["s"],
    }


async def test_problems_of_another_loader_are_their_own_columns():
    problem = {"dataset": "train", "task": "?", "answer": "42", "id": 3}
    result = await run_rollout(generate_rollout, problem, ["#### 42"], cfg("gsm8k_score"))
    assert result.metrics.reward == 1.0


def test_rows_keep_all_columns_and_the_ground_truth_as_it_is(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "?", "truth": {"tests": [1]}, "task": "math"}))
    name = str(tmp_path / "rows.jsonl")
    (problem,) = load_problems([name], columns={"task": "q", "ground_truth": "truth.tests"})
    row = {"q": "?", "truth": {"tests": [1]}, "task": "math"}
    assert problem == {"dataset": name, "task": "?", "answer": [1], "columns": row}
    with pytest.raises(DomainError, match=says("ground_truth", "'nowhere'")):
        load_problems([name], columns={"task": "q", "ground_truth": "nowhere"})


MINE = ["output_dir=x", "train_dataset_names=[rows.jsonl]"]


def test_five_lines_are_an_experiment_whose_verifier_knows_the_function():
    config = parse(compose("reward_function", [*MINE, "reward_function=my_module.score"]))
    check_rules(config)
    assert verifier_of(config).judges == ["reward:my_module.score"]


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("reward_function", [], ("`reward_function` is not set", "my_module.score")),
        ("base", ["reward_function=a.b"], ("no domain plays it", "--config-name=reward_function")),
        ("reward_function", ["reward_function=[a.x, b.x]"], ("'x'", "rename")),
        ("reward_function", ["reward_function=[a.x, b.success]"], ("'success'", "rename")),
        ("reward_function", ["reward_function=[math, helpful]"], ("'helpful'", "no judge", "['math']")),
        ("reward_function", ["reward_function=3"], ("reward_function",)),
    ],
)
def test_reward_function_that_says_nothing_is_refused(name, overrides, words):
    with pytest.raises(ConfigError, match=says(*words)):
        check_rules(parse(compose(name, [*MINE, *overrides])))


def test_weights_may_stand_on_the_command_line():
    config = parse(compose("reward_function", [*MINE, "reward_function={my_module.a: 1.0, my_module.b: 0.2}"]))
    assert config.reward_function == {"my_module.a": 1.0, "my_module.b": 0.2}
