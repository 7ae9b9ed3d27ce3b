"""Modules with the imports and calls of PipelineRL's domains, written anew: the names are here and do their work."""

import inspect
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from fastapi.testclient import TestClient
from omegaconf import DictConfig, OmegaConf

from pipelinerl import countdown_utils
from pipelinerl.async_llm import (
    RetryableAbortedCompletionError,
    is_retryable,
    llm_async_generate,
    make_training_text,
    make_training_texts_from_llm_calls,
    read_answer,
)
from pipelinerl.config.load import compose, validate
from pipelinerl.config.sections import VerifierSection
from pipelinerl.domains.dispatcher import generate_multidomain_rollout, register_domain_rollout
from pipelinerl.domains.guessing import load_problems as load_guessing
from pipelinerl.domains.math import (
    MathEnvironment,
    RewardTable,
    get_reward,
    load_datasets,
    load_problems,
    verify_answer,
)
from pipelinerl.domains.math.rollouts import length_penalty
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.errors import DomainError
from pipelinerl.llm import GenerateRequest, LLMCall, LLMEvent, LLMOutput, LLMStream, Prompt, TrainableLLM
from pipelinerl.records.answers import Answer, Completion
from pipelinerl.rollouts import (
    BaseMetrics,
    RolloutResult,
    TrainingText,
    apply_rollout_reward,
    rollout_has_overflow,
    summarize_training_texts,
)
from pipelinerl.streams.codec import Codec
from pipelinerl.testing import FakeLLM, run_rollout
from pipelinerl.utils import get_environment_jobs, resolve_environment_key
from tests.says import says

REWARDS = {"correct": 1.0, "wrong": -0.5, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}


class ToolMetrics(BaseMetrics):
    num_turns: int
    overflow: bool


async def play_with_a_tool(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """A domain of several turns: a budget per turn, one reward for all texts, a summary as metrics."""
    begin, calls, messages = time.time(), [], [{"role": "user", "content": problem["task"]}]
    for _ in range(int(cfg.actor.get("agent_max_loops", 3))):
        call = await llm_async_generate(llm, Prompt(messages=messages), session, max_tokens_override=problem["budget"])
        calls.append(call)
        messages = [*messages, {"role": "assistant", "content": call.output.content or ""}]
        if "\\boxed" in (call.output.content or ""):
            break
        messages.append({"role": "user", "content": "Go on."})
    status = verify_answer(calls[-1].output.content or "", problem["answer"], strict=True)
    texts = make_training_texts_from_llm_calls(llm, calls)
    reward = get_reward(status, not rollout_has_overflow(texts), RewardTable(**dict(cfg.rewards)))
    summary = summarize_training_texts(apply_rollout_reward(texts, reward))
    metrics = ToolMetrics(
        reward=reward,
        success=status == "correct",
        no_error=status != "unparsable",
        no_answer=status == "no_answer",
        num_turns=summary.num_turns,
        overflow=summary.overflow,
    )
    return RolloutResult(
        training_texts=texts, metrics=metrics, latency=time.time() - begin, dataset_name="tool", domain="math"
    )


PROBLEM = {"task": "2 + 2 = ?", "answer": "4", "budget": 64, "domain": "math"}


@pytest.mark.parametrize(
    ("replies", "budget", "reward", "turns", "overflow"),
    [
        (["Let me see.", "\\boxed{4}"], 64, 1.0, 2, False),
        (["\\boxed{5}"], 64, -0.5, 1, False),
        (["hm", "hm", "hm"], 64, -1.0, 3, False),
        (["a long thought", "\\boxed{4}"], 10, 1.0, 2, True),  # cut after 10 bytes, and no reward of its own for that
    ],
)
async def test_domain_of_several_turns_runs_unchanged(
    replies: list[str], budget: int, reward: float, turns: int, overflow: bool
) -> None:
    cfg = OmegaConf.create({"actor": {"agent_max_loops": 3}, "rewards": REWARDS})
    result = await run_rollout(play_with_a_tool, PROBLEM | {"budget": budget}, replies, cfg)
    assert [text.reward for text in result.training_texts] == [reward] * turns
    assert result.metrics.overflow is overflow  # type: ignore[attr-defined]
    assert max(text.output_tokens for text in result.training_texts) <= budget


async def play_with_functions(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """A domain of function calls: tools in the system message, a judge of its own over HTTP, partial credit."""
    begin = time.time()
    tools = [tool.get("function", tool) for tool in problem["extra_info"]["oai_tools"]]
    messages = [
        {"role": "system", "content": f"{cfg.actor.get('system_prompt', '')}\n{tools}"},
        {"role": "user", "content": cfg.actor.get("task_template", "{task}").format(task=problem["task"])},
    ]
    call = await llm_async_generate(llm, Prompt(messages=messages, tools=None), session)
    called = [{"name": one.function.name} for one in call.output.tool_calls] if call.output.tool_calls else None
    (job,) = get_environment_jobs(cfg, resolve_environment_key(cfg, default="fn_calling"))
    body = {"generation": call.output.content, "tool_calls": called, "reward_context": problem["reward_context"]}
    async with session.post(f"http://{job.hostname}:{job.port}/verify", json=body) as answer:
        verdict = await answer.json()
    table, trace = RewardTable(**dict(cfg.rewards)), make_training_text(llm, call)
    table.log_config("fn_calling")
    reward = table.correct_answer_finished if verdict["answer_status"] == "correct" else table.wrong_answer_finished
    if verdict["answer_status"] == "wrong":
        reward += verdict["partial_score"] * (table.correct_answer_finished - reward)
    reward *= cfg.actor.discount_factor**call.output_length_tokens
    if table.buffer_tokens > 0:
        reward += length_penalty(llm.parameters["max_tokens"], call.output_length_tokens, table.buffer_tokens)
    trace.reward = reward
    trace.metadata.setdefault("fn_calling", {}).update(verdict)
    metrics = BaseMetrics(reward=reward, success=verdict["answer_status"] == "correct", no_error=True, no_answer=False)
    return RolloutResult(
        training_texts=[trace], metrics=metrics, latency=time.time() - begin, dataset_name="bfcl", domain="fn_calling"
    )


@pytest.fixture
async def judge_of_functions() -> AsyncIterator[dict[str, Any]]:
    """A stand-in for the service of a domain, as the job that the run would have placed."""

    async def verify(request: web.Request) -> web.Response:
        body = await request.json()
        found = sum(name in body["generation"] for name in body["reward_context"]["names"])
        share = found / len(body["reward_context"]["names"])
        return web.json_response({"answer_status": "correct" if share == 1 else "wrong", "partial_score": share})

    app = web.Application()
    app.router.add_post("/verify", verify)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    yield {"name": "environment_0", "kind": "environment", "environment_key": "fn_calling", "port": port}
    await runner.cleanup()


@pytest.mark.parametrize(("reply", "reward"), [("add(1, 2) mul(3, 4)", 1.0), ("add(1, 2)", 0.25), ("no", -0.5)])
async def test_domain_with_a_judge_of_its_own_runs_unchanged(
    reply: str, reward: float, judge_of_functions: dict[str, Any]
) -> None:
    cfg = OmegaConf.create({"actor": {"discount_factor": 1}, "rewards": REWARDS, "jobs": [judge_of_functions]})
    names = {"reward_context": {"names": ["add", "mul"]}, "extra_info": {"oai_tools": [{"name": "add"}]}}
    result = await run_rollout(play_with_functions, PROBLEM | names, [reply], cfg)
    assert result.training_texts[0].reward == reward
    assert result.training_texts[0].metadata["fn_calling"]["partial_score"] == {1.0: 1.0, 0.25: 0.5, -0.5: 0.0}[reward]


async def test_budget_of_a_call_goes_before_that_of_the_model() -> None:
    llm = FakeLLM.saying(["twelve bytes"] * 2, parameters={"max_tokens": 6})
    async with aiohttp.ClientSession() as session:
        lengths = [
            (await llm_async_generate(llm, Prompt.from_user_message("?"), session, max_tokens_override=budget))
            for budget in (3, None)
        ]
    assert [call.output_length_tokens for call in lengths] == [3, 6]


async def test_reward_may_be_given_with_the_calls() -> None:
    llm = FakeLLM.saying(["a", "b"])
    async with aiohttp.ClientSession() as session:
        calls = [await llm_async_generate(llm, Prompt.from_user_message("?"), session) for _ in range(2)]
    assert [text.reward for text in make_training_texts_from_llm_calls(llm, calls, 0.25)] == [0.25, 0.25]
    assert make_training_texts_from_llm_calls(llm, calls)[0].input_ids == make_training_text(llm, calls[0]).input_ids


async def test_format_that_constrains_the_sampler_is_refused_with_the_reason() -> None:
    async with aiohttp.ClientSession() as session:
        free = Prompt(messages=[{"role": "user", "content": "?"}], response_format={"type": "text"})
        assert (await llm_async_generate(FakeLLM.saying(["yes"]), free, session)).output.content == "yes"
        for given in ({"type": "json_object"}, BaseMetrics):
            prompt = Prompt(messages=[{"role": "user", "content": "?"}], response_format=given)
            with pytest.raises(DomainError, match=says("constrained sampler")):
                await llm_async_generate(FakeLLM.saying(["{}"]), prompt, session)


async def test_aborted_completion_is_tried_again_and_then_told() -> None:
    aborted = Completion(
        token_ids=np.array([1], np.int32),
        logprobs=np.array([-1.0], np.float32),
        version_spans=None,
        finish_reason="abort",
    )
    payload = Codec(Answer).encode(Answer(completions=(aborted,)))
    asked = {"token_ids": np.array([1], np.int32), "body_key": b"{}", "model": "m", "retries": 0, "base_delay_s": 0.0}
    with pytest.raises(RetryableAbortedCompletionError, match="'abort'") as told:
        read_answer(payload, GenerateRequest(**asked), 1)
    assert is_retryable(told.value)


def test_texts_are_summarised() -> None:
    texts = [
        TrainingText(text="ab", n_predicted=1, prompt_tokens=3, output_tokens=2, finished=True),
        TrainingText(text="ab", n_predicted=1, prompt_tokens=5, output_tokens=4, finished=False),
    ]
    summary = summarize_training_texts(iter(texts))
    assert (summary.prompt_tokens, summary.output_tokens) == ([3, 5], [2, 4])
    assert (summary.overflow, summary.num_turns) == (True, 2)
    assert not rollout_has_overflow(texts[:1])
    assert not rollout_has_overflow([])


def stream(*events: LLMEvent) -> LLMStream:
    return LLMStream(iter(events), Prompt.from_user_message("?"))


def test_stream_of_events_gives_output_text_and_call() -> None:
    output = LLMOutput(content="yes")
    call = LLMCall(prompt=Prompt.from_user_message("?"), output=output)
    whole = stream(LLMEvent(chunk="y"), LLMEvent(output=output, llm_call=call), LLMEvent(chunk="late"))
    assert (whole.get_output(), whole.get_llm_call()) == (output, call)
    assert [event.chunk for event in whole] == ["late"]
    assert stream(LLMEvent(output=output)).get_text() == "yes"
    assert stream(LLMEvent(chunk="y"), LLMEvent(llm_call=call)).get_llm_call() is call


def test_stream_without_an_answer_says_so() -> None:
    null = LLMStream(None, Prompt())
    assert not null
    for ask in (null.get_output, stream().get_output, stream(LLMEvent(output=LLMOutput())).get_text):
        with pytest.raises(ValueError, match=r"stream|no text"):
            ask()
    with pytest.raises(ValueError, match="without its call"):
        stream(LLMEvent(chunk="y")).get_llm_call()


@pytest.mark.parametrize(
    ("prediction", "gold", "status"),
    [
        ("so \\boxed{\\frac{1}{2}}", "0.5", "correct"),
        ("so \\boxed{3}", "4", "wrong"),
        ("so 4", "4", "no_answer"),
        ("\\boxed{" + "1" * 1000 + "}", "4", "unparsable"),
        ("\\boxed{(3 + 5) * 2}", "countdown-16-[2, 3, 5]", "correct"),
        ("\\boxed{3 + 5 * 2}", "countdown-16-[2, 3, 5]", "wrong"),
        ("\\boxed{8 * 2}", "countdown-16-[2, 3, 5]", "wrong"),
        ("\\boxed{__import__('os')}", "countdown-16-[2, 3, 5]", "unparsable"),
        ("16", "countdown-16-[2, 3, 5]", "no_answer"),
    ],
)
def test_answer_is_verified(prediction: str, gold: str, status: str) -> None:
    assert verify_answer(prediction, gold) == status


@pytest.fixture(scope="module")
def verifier() -> Any:
    settings = VerifierSection(workers=1, timeout_s=20, memory_mb=1024, max_body_kb=64, judges=[])
    with TestClient(create_app(settings)) as client:
        yield client


def test_verifier_has_the_route_of_pipelinerls_environment(verifier: TestClient) -> None:
    """The body and the answer of PipelineRL's own `verify_answer_rpc`."""
    body = {"prediction": "\\boxed{4}", "gold": "4", "strict": True, "max_prediction_length": 1000}
    statuses = [
        verifier.post("/verify_answer", json=body | changes).json()
        for changes in ({}, {"prediction": "\\boxed{5}"}, {"prediction": "4"}, {"max_prediction_length": 3})
    ]
    assert [status["answer_status"] for status in statuses] == ["correct", "wrong", "no_answer", "unparsable"]
    assert verifier.post("/verify_answer", json={"gold": "4"}).status_code == 422
    assert verifier.get("/health").json()["status"] == "ok"


def test_reward_table_is_made_of_either_table() -> None:
    ours = RewardTable(**REWARDS | {"unfinished": {"correct": 0.5}})
    assert (ours.correct_answer_finished, ours.correct_answer_not_finished) == (1.0, 0.5)
    assert (ours.wrong_answer_finished, ours.wrong_answer_not_finished) == (-0.5, -0.5)
    assert RewardTable(**REWARDS | {"unfinished": -2.0}).get_reward_range() == (-2.0, 1.0)
    theirs = {f"{name}_{end}": 0.5 for name in ("correct_answer", "wrong_answer", "no_answer", "unparsable")
              for end in ("finished", "not_finished")}  # fmt: skip
    assert RewardTable(**REWARDS | theirs).get_reward_range() == (0.5, 0.5)


@pytest.mark.parametrize(
    ("output", "solution", "well_formed"),
    [
        ("<think>1</think>\n\\boxed{1 + 2}", "1 + 2", True),
        ("<think> </think>\n\\boxed{1 + 2}", "1 + 2", False),
        ("\\boxed{1 + 2}\nso 3", None, False),
        ("</think> a <think>\n\\boxed{}", None, False),
    ],
)
def test_countdown_answers_are_found(output: str, solution: str | None, well_formed: bool) -> None:
    assert countdown_utils.extract_solution(output) == solution
    assert countdown_utils.validate_format(output) is well_formed


def test_countdown_equations_are_computed_and_never_executed() -> None:
    assert countdown_utils.validate_equation("(1 + 2) * 3", [3, 2, 1])
    assert not countdown_utils.validate_equation("1 + 2", [1, 2, 3])
    assert countdown_utils.evaluate_equation("(1 + 2) / 4") == 0.75
    assert countdown_utils.evaluate_equation("1 / 0") is None
    assert countdown_utils.evaluate_equation("().__class__") is None


async def test_dispatcher_plays_the_domain_of_the_problem() -> None:
    name = f"{__name__}.play_with_a_tool"
    cfg = {"actor": {"domain_rollouts": {"math": "pipelinerl.domains.nowhere.play"}}, "rewards": REWARDS}
    with pytest.raises(DomainError, match=r"`actor.domain_rollouts.math`: .*nowhere"):
        await run_rollout(generate_multidomain_rollout, PROBLEM, ["\\boxed{4}"], cfg)
    guessing = load_guessing(["test"])[0] | {"domain": "guessing"}
    cfg = {"actor": {"domain_rollouts": {"guessing": "pipelinerl.domains.guessing.generate_guessing_rollout"}}}
    played = await run_rollout(generate_multidomain_rollout, guessing, [f"<answer>{guessing['answer']}</answer>"], cfg)
    assert (played.domain, played.metrics.success) == ("guessing", True)
    with pytest.raises(DomainError, match=r"problem\['domain'\] is 'tir'.*\['guessing'\]"):
        await run_rollout(generate_multidomain_rollout, guessing | {"domain": "tir"}, [""], cfg)
    with pytest.raises(DomainError, match=r"a function as module\.function"):
        register_domain_rollout("tir", name.rpartition(".")[2])


def test_dispatcher_is_configured_by_its_old_key() -> None:
    overrides = [
        "output_dir=x",
        "actor.rollout_policy=pipelinerl.domains.dispatcher.generate_multidomain_rollout",
        "+actor.domain_rollouts.math=pipelinerl.domains.math.generate_math_rollout",
    ]
    assert validate(compose("base", overrides)).actor.domain_rollouts["math"].endswith("generate_math_rollout")


@pytest.mark.parametrize(
    ("default", "found"),
    [("math", ["environment_0"]), ("tools", ["environment_1", "environment_2"]), ("logic", ["verifier_0"])],
)
def test_environments_are_found_by_their_key(default: str, found: list[str]) -> None:
    keys = {"environment_0": "math", "environment_1": "tools", "environment_2": "tools", "verifier_0": None}
    jobs = [{"name": name, "kind": "environment", "environment_key": key} for name, key in keys.items()]
    cfg = OmegaConf.create({"jobs": jobs})
    key = resolve_environment_key(cfg, default=default)
    assert [job.name for job in get_environment_jobs(cfg, key)] == found
    assert resolve_environment_key(OmegaConf.create({"jobs": jobs[:1]}), default="other") == "math"
    assert resolve_environment_key(OmegaConf.create({"jobs": jobs, "environment_key": "tools"}), "math") == "tools"
    assert len(get_environment_jobs(cfg)) == 3


def test_math_environment_has_pipelinerls_interface() -> None:
    assert next(iter(inspect.signature(MathEnvironment().launch).parameters)) == "port"


def test_jobs_and_loaders_keep_their_names() -> None:
    cfg = OmegaConf.create({"jobs": []})
    assert resolve_environment_key(cfg, default="math") == "math"
    assert get_environment_jobs(cfg, "math") == []
    assert load_datasets is load_problems
