"""One task and one answer, judged on its form. The share of constraints that hold gives partial credit."""

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.instructions.judge import judge
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("task", "constraints")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=problem["task"],
        judge=lambda output: judge(output, problem["constraints"], {}),
    )
