"""The rollout of one task with one program as answer."""

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.coding.judge import TestSuite, judge
from pipelinerl.domains.sandbox.choice import runner_of
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("task", "tests")

STDIN_PROMPT = "Write a Python program that reads standard input and writes standard output."
FUNCTION_PROMPT = "Write a Python function named `{name}`."
FORMAT_PROMPT = "Think first, then give the whole program in one ```python block."


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
