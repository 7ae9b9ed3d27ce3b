"""The rollout of one question with one expression as answer."""

from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.domains.countdown.judge import judge
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("numbers", "target", "use_all")


def question(numbers: list[int], target: int, use_all: bool) -> str:
    listed = ", ".join(map(str, numbers))
    use = "every number once" if use_all else "each number at most once"
    return f"Make {target} from {listed}. Use {use} and + - * / ( ). Answer as <answer>expression</answer>."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    return await ask_and_judge(
        cfg,
        llm,
        problem,
        session,
        task=question(problem["numbers"], problem["target"], problem["use_all"]),
        judge=lambda output: judge(output, problem, {"use_all": problem["use_all"]}),
    )
