"""One task, one program."""

import asyncio
import os
import time
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.coding.fusion import SandboxFusion
from pipelinerl.domains.coding.judge import Runner, TestSuite, judge
from pipelinerl.domains.rewards import RewardTable
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.sandbox import Sandbox
from pipelinerl.verifier.protocol import Verdict

required_problem_keys = ("task", "tests")

ENDPOINT_VARIABLE = "SANDBOX_ENDPOINT"
STDIN_PROMPT = "Write a Python program that reads standard input and writes standard output."
FUNCTION_PROMPT = "Write a Python function named `{name}`."
FORMAT_PROMPT = "Think first, then give the whole program in one ```python block."

_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def runner_of(cfg: DictConfig, session: aiohttp.ClientSession) -> Runner:
    """SandboxFusion where an endpoint is configured, else the embedded sandbox, one per process."""
    endpoint = cfg.get("sandbox_endpoint") or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint:
        return SandboxFusion(endpoint, session)
    return _sandboxes.setdefault(asyncio.get_running_loop(), Sandbox())


def instructions(tests: dict[str, Any]) -> str:
    name = tests.get("fn_name")
    return f"{FUNCTION_PROMPT.format(name=name) if name else STDIN_PROMPT} {FORMAT_PROMPT}"


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """``cfg.environment.partial_credit``: the share of tests passed counts (default false: all or nothing)."""
    started = time.monotonic()
    messages = [
        {"role": "system", "content": instructions(problem["tests"])},
        {"role": "user", "content": problem["task"]},
    ]
    llm_call = await llm_async_generate(llm, Prompt(messages=messages), session)
    suite = TestSuite.from_problem(problem["tests"])
    verdict = await judge(llm_call.output.content or "", suite, runner_of(cfg, session))
    if not (cfg.get("environment") or {}).get("partial_credit", False) and verdict.status == "wrong":
        verdict = Verdict(status="wrong", detail=verdict.detail)
    text = make_training_text(llm, llm_call)
    metrics = RewardTable.of(cfg).metrics(verdict, finished=text.finished)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
