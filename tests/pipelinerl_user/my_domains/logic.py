"""Riddles with a verdict of a server of the domain's own: `answer_status` alone."""

import time

import aiohttp
from omegaconf import DictConfig

from my_domains.rewarding import judged, prompt_of
from my_domains.serving import ask, serve
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


def verify_answer(prediction: str, reward_context: dict) -> str:
    if "yes" not in prediction and "no" not in prediction:
        return "no_answer"
    return "correct" if reward_context["answer"] in prediction else "wrong"


class LogicEnvironment:
    def launch(self, port: int):
        serve(port, lambda body: {"answer_status": verify_answer(body["prediction"], body["reward_context"])})


async def generate_logic_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    begin = time.time()
    llm_call = await llm_async_generate(llm, prompt_of(cfg, problem["task"]), session)
    body = {"prediction": llm_call.output.content, "reward_context": problem.get("reward_context", {})}
    status = (await ask(cfg, session, "logic", body))["answer_status"]
    return judged(cfg, llm, llm_call, problem, status, time.time() - begin)


def load_problems(dataset_names, *, min_difficulty: float = 0.0, **_) -> list[dict]:
    task = "All cats purr. Tom is a cat. Does Tom purr? yes or no"
    return [{"task": task, "reward_context": {"answer": "yes"}, "dataset": name} for name in dataset_names]
