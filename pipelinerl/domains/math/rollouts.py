"""The rollout of one problem with one answer, which the verifier service judges."""

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.math.outcomes import RewardTable as RewardTable
from pipelinerl.domains.math.outcomes import get_reward as get_reward
from pipelinerl.domains.math.outcomes import length_penalty as length_penalty
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.domains.verifier_client import client_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("task", "answer")

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. ``cfg.environment.answer_format`` is ``boxed`` (default) or ``any``."""
    answer_format = (cfg.get("environment") or {}).get("answer_format", "boxed")

    async def judge(output: str) -> Verdict:
        client = client_of(cfg)
        return await client.check(session, "math", output, problem["answer"], answer_format=answer_format)

    return await ask_and_judge(
        cfg, llm, problem, session, task=problem["task"], judge=judge, system_prompt=SYSTEM_PROMPT
    )
