"""The rollout of one task with one program as answer."""

import asyncio
import os
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.coding.fusion import RUN_TIMEOUT_S, SandboxFusion
from pipelinerl.domains.coding.judge import Runner, TestSuite, judge
from pipelinerl.domains.sandbox import Sandbox
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("task", "tests")

ENDPOINT_VARIABLE = "SANDBOX_ENDPOINT"
STDIN_PROMPT = "Write a Python program that reads standard input and writes standard output."
FUNCTION_PROMPT = "Write a Python function named `{name}`."
FORMAT_PROMPT = "Think first, then give the whole program in one ```python block."

_sandboxes: WeakKeyDictionary[asyncio.AbstractEventLoop, Sandbox] = WeakKeyDictionary()


def runner_of(cfg: DictConfig, session: aiohttp.ClientSession) -> Runner:
    """Returns SandboxFusion if an endpoint is configured, else the embedded sandbox, one per event loop."""
    endpoint = cfg.get("sandbox_endpoint") or os.environ.get(ENDPOINT_VARIABLE)
    if endpoint:
        return SandboxFusion(endpoint, session, run_timeout_s=cfg.get("sandbox_timeout_s") or RUN_TIMEOUT_S)
    return _sandboxes.setdefault(asyncio.get_running_loop(), Sandbox())


def instructions(tests: dict[str, Any]) -> str:
    name = tests.get("fn_name")
    return f"{FUNCTION_PROMPT.format(name=name) if name else STDIN_PROMPT} {FORMAT_PROMPT}"


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. With ``cfg.environment.partial_credit`` (default false) the share of passed tests counts."""
    partial_credit = (cfg.get("environment") or {}).get("partial_credit", False)

    async def judge_program(output: str) -> Verdict:
        verdict = await judge(output, TestSuite.from_problem(problem["tests"]), runner_of(cfg, session))
        all_or_nothing = verdict.status == "wrong" and not partial_credit
        return Verdict(status="wrong", detail=verdict.detail) if all_or_nothing else verdict

    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=problem["task"],
        judge=judge_program,
        system_prompt=instructions(problem["tests"]),
    )
