"""Domain modules in the manner of ServiceNow's PipelineRL run unchanged: its import paths and configuration names."""

import importlib
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from omegaconf import DictConfig, OmegaConf

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.config.load import compose, parse, to_container
from pipelinerl.domains.math import RewardTable, get_reward, length_penalty, verify_answer_rpc
from pipelinerl.domains.verifier.judges import JUDGES
from pipelinerl.launcher.preflight import check_domain
from pipelinerl.records.verdicts import Check
from pipelinerl.rollouts import RolloutResult
from pipelinerl.testing import run_rollout
from pipelinerl.world import Job, WorldMap

SERVED = """
import random
import time
import aiohttp
from omegaconf import DictConfig
from pydantic import BaseModel

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.math.rollouts import RewardTable, get_reward, length_penalty
from pipelinerl.domains.math import verify_answer_rpc
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.utils import get_environment_jobs, resolve_environment_key
from pipelinerl.world import Job


class Metrics(BaseMetrics):
    penalty: float
    finished: bool = False


def load_problems(dataset_names: list[str]) -> list[dict]:
    return [{"task": f"{a} + 1?", "answer": str(a + 1), "dataset": name} for name in dataset_names for a in range(8)]


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    messages = []
    if cfg.actor.system_prompt:
        messages.append({"role": "system", "content": cfg.actor.system_prompt})
    messages.append({"role": "user", "content": cfg.actor.task_template.format(task=problem["task"])})
    begin = time.time()
    llm_call = await llm_async_generate(llm, Prompt(messages=messages), session)
    latency = time.time() - begin
    assert llm_call.output.content is not None

    env_jobs = [Job(**job) for job in cfg.jobs if job["kind"] == "environment"]
    assert [j.port for j in get_environment_jobs(cfg, resolve_environment_key(cfg))] == [j.port for j in env_jobs]
    env_job = random.choice(env_jobs)
    assert env_job.port is not None
    status = await verify_answer_rpc(
        session=session,
        host=env_job.hostname,
        port=env_job.port,
        prediction=llm_call.output.content,
        gold=problem["answer"],
        strict=True,
    )
    trace = make_training_text(llm, llm_call)
    rewards = RewardTable(**dict(cfg.rewards))
    reward = get_reward(status, trace.finished, rewards)
    reward *= cfg.actor.discount_factor ** llm_call.output_length_tokens
    penalty = 0
    if rewards.buffer_tokens > 0:
        penalty = length_penalty(llm.parameters["max_tokens"], llm_call.output_length_tokens, rewards.buffer_tokens)
    trace.reward = reward + penalty
    trace.metadata.setdefault("judged", {}).update({"status": status})
    metrics = Metrics(
        reward=reward + penalty,
        success=status == "correct",
        no_error=status != "unparsable",
        no_answer=status == "no_answer",
        penalty=penalty,
        finished=trace.finished,
    )
    return RolloutResult(
        training_texts=[trace], metrics=metrics, latency=latency, dataset_name=problem.get("dataset"), domain="served"
    )
"""

ALONE = """
import re, time
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import LLMCall, LLMOutput, Prompt, TokenLogprob, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText


def load_problems(dataset_names: list[str]) -> list[dict]:
    words = {"train": ["banana", "tree", "letter"], "test": ["alpaca"]}
    return [{"word": w, "letter": w[1], "count": w.count(w[1]), "dataset": n} for n in dataset_names for w in words[n]]


async def generate_rollout(cfg, llm, problem, session):
    messages = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": f"How many {problem['letter']}'s are there in '{problem['word']}'?"},
    ]
    begin = time.time()
    llm_call: LLMCall = await llm_async_generate(llm, Prompt(messages=messages), session)
    reward, error = 0, 0
    answer = re.search(r"<answer>(\\d+)</answer>", llm_call.output.content or "")
    if answer is None:
        error = 1
    elif int(answer.group(1)) == problem["count"]:
        reward = 1
    text: TrainingText = make_training_text(llm, llm_call)
    text.reward = reward
    metrics = BaseMetrics(reward=reward, success=reward, no_error=not error, no_answer=error)
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.time() - begin,
        dataset_name=problem["dataset"],
        domain="counting",
    )
"""

EXPERIMENT = """
defaults:
    - base
    - _self_

actor:
    rollout_policy: {module}.generate_rollout
    system_prompt: Please reason step by step.
    task_template: |-
        {{task}}
environment: null
dataset_loader: {module}.load_problems
train_dataset_names:
    - train
test_dataset_names:
    - test
rewards:
    wrong_answer_not_finished: -0.5
    wrong_answer_finished: -0.25
    no_answer_not_finished: -1
    no_answer_finished: -1
    unparsable_not_finished: -1
    unparsable_finished: -1
    correct_answer_not_finished: 0.5
    correct_answer_finished: 1
    buffer_tokens: 10
llm:
    parameters:
        max_tokens: 25
"""


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``experiment(name, body)``: writes module and experiment file; returns rollout function and config."""
    monkeypatch.syspath_prepend(tmp_path)
    names = []

    def make(name: str, body: str) -> tuple[Any, DictConfig]:
        names.append(name)
        (tmp_path / f"{name}.py").write_text(body)
        (tmp_path / "experiment.yaml").write_text(EXPERIMENT.format(module=name))
        cfg = compose("experiment", [f"output_dir={tmp_path / 'run'}"], config_dir=tmp_path)
        parse(cfg)
        return importlib.import_module(name).generate_rollout, cfg

    yield make
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
async def verifier() -> AsyncIterator[Job]:
    """The verifier's route with its real judge, in this process."""

    async def check(request: web.Request) -> web.Response:
        asked = Check(**await request.json())
        verdict = JUDGES[asked.kind](asked.prediction, asked.gold, asked.options)
        return web.json_response({"status": verdict.status, "score": verdict.score, "detail": verdict.detail})

    app = web.Application()
    app.router.add_post("/", check)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    yield Job(name="verifier_0", kind="verifier", port=port, url=f"http://127.0.0.1:{port}")
    await runner.cleanup()


def as_run(cfg: DictConfig, *jobs: Job) -> DictConfig:
    """The configuration as a rollout function of a run gets it: resolved, with the run's jobs."""
    world = WorldMap(accelerator="cpu", nodes=(), jobs=jobs, master_port=0, weight_port=0, weight_ports=0)
    resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.create({**resolved, "jobs": world.job_dicts()})


def as_sample(result: RolloutResult) -> Any:
    """What the actor makes of it."""
    return to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=1, fallback_version=0, seq_length=4096)


@pytest.mark.parametrize(
    ("reply", "finish_reason", "reward", "penalty"),
    [
        ("so \\boxed{3}", "stop", 1.0, 0.0),  # 13 tokens, the ramp goes from 15 to 25
        ("so \\boxed{4}", "stop", -0.25, 0.0),
        ("so \\boxed{4}", "length", -0.5, 0.0),
        ("three", "stop", -1.0, 0.0),
        ("therefore \\boxed{3}", "stop", 1.0, -0.5),  # 19 characters and the end of the turn: 20 - 15 of 10
    ],
)
async def test_module_that_asks_an_environment_runs_unchanged(
    experiment: Any, verifier: Job, reply: str, finish_reason: str, reward: float, penalty: float
):
    rollout, cfg = experiment("served_domain", SERVED)
    problem = {"task": "2 + 1?", "answer": "3", "dataset": "train"}
    result = await run_rollout(
        rollout, problem, [reply], as_run(cfg, verifier), finish_reason=finish_reason, parameters={"max_tokens": 25}
    )
    assert result.training_texts[0].prompt_text.count("Please reason step by step.") == 1
    sample = as_sample(result)
    assert sample.metrics["penalty"] == pytest.approx(penalty)
    assert sample.reward == pytest.approx(reward + penalty)
    assert sample.metrics["finished"] == (finish_reason == "stop")


@pytest.mark.parametrize(("reply", "reward"), [("<answer>3</answer>", 1), ("<answer>2</answer>", 0), ("three", 0)])
async def test_module_with_numbers_for_truth_values_runs_unchanged(experiment: Any, reply: str, reward: int):
    rollout, cfg = experiment("alone_domain", ALONE)
    problem = {"word": "banana", "letter": "a", "count": 3, "dataset": "train"}
    result = await run_rollout(rollout, problem, [reply], as_run(cfg))
    sample = as_sample(result)
    assert (sample.reward, sample.metrics["success"], sample.metrics["no_answer"]) == (reward, reward, reply == "three")


def test_launcher_accepts_the_module_and_its_experiment(experiment: Any, tmp_path: Path, monkeypatch):
    _, cfg = experiment("alone_domain", ALONE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_domain({**to_container(cfg), "jobs": []}) == []


TABLE = RewardTable(
    wrong_answer_not_finished=1,
    wrong_answer_finished=2,
    no_answer_not_finished=3,
    no_answer_finished=4,
    unparsable_not_finished=5,
    unparsable_finished=6,
    correct_answer_not_finished=7,
    correct_answer_finished=8,
)


def test_get_reward_reads_every_entry_of_the_table():
    statuses = ("wrong", "no_answer", "unparsable", "correct")
    assert [get_reward(s, finished, TABLE) for s in statuses for finished in (False, True)] == list(range(1, 9))
    with pytest.raises(ValueError, match="'error'"):
        get_reward("error", True, TABLE)


@pytest.mark.parametrize(("tokens", "penalty"), [(60, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, 0)])
def test_length_penalty_falls_to_minus_one_at_the_limit(tokens: int, penalty: float):
    assert length_penalty(100, tokens, 20) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("prediction", "gold", "options", "status"),
    [
        ("\\boxed{(1,2)}", "(1,2)", {}, "correct"),
        ("\\boxed{y^2+1}", "x^2+1", {}, "wrong"),
        ("\\boxed{y^2+1}", "x^2+1", {"strict": False}, "correct"),
        ("\\boxed{12345}", "12345", {"max_prediction_length": 10}, "unparsable"),
        ("", "1", {}, "no_answer"),
    ],
)
async def test_verify_answer_rpc_gives_the_status(verifier: Job, prediction, gold, options, status):
    assert verifier.port is not None
    async with aiohttp.ClientSession() as session:
        assert (
            await verify_answer_rpc(
                session, host="127.0.0.1", port=verifier.port, prediction=prediction, gold=gold, **options
            )
            == status
        )
