"""One question, one expression."""

import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.countdown.judge import judge
from pipelinerl.domains.rewards import RewardTable
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult

required_problem_keys = ("numbers", "target", "use_all")


def question(numbers: list[int], target: int, use_all: bool) -> str:
    listed = ", ".join(map(str, numbers))
    use = "every number once" if use_all else "each number at most once"
    return f"Make {target} from {listed}. Use {use} and + - * / ( ). Answer as <answer>expression</answer>."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    asked = question(problem["numbers"], problem["target"], problem["use_all"])
    llm_call = await llm_async_generate(llm, Prompt.from_user_message(asked), session)
    verdict = judge(llm_call.output.content or "", problem, {"use_all": problem["use_all"]})
    text = make_training_text(llm, llm_call)
    metrics = RewardTable.of(cfg).metrics(verdict, finished=text.finished)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
