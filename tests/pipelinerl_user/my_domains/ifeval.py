"""Instructions about the form of an answer. The server of the domain tells how many were followed."""

import time

import aiohttp
from omegaconf import DictConfig

from my_domains.rewarding import judged, prompt_of
from my_domains.serving import ask, serve
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult


def verify_answer(prediction: str, reward_context: dict) -> dict:
    followed = sum(word in prediction for word in reward_context["words"])
    total = len(reward_context["words"])
    status = "no_answer" if not prediction else "correct" if followed == total else "partial" if followed else "wrong"
    return {"answer_status": status, "followed_count": followed, "total_count": total, "score": followed / total}


class IFEvalEnvironment:
    def launch(self, port: int):
        serve(port, lambda body: verify_answer(body["prediction"], body["reward_context"]))


async def generate_ifeval_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    time_start = time.time()
    llm_call = await llm_async_generate(llm, prompt_of(cfg, problem["task"]), session)
    latency = time.time() - time_start
    body = {"prediction": llm_call.output.content, "reward_context": problem.get("reward_context", {})}
    verdict = await ask(cfg, session, "ifeval", body)
    credit = verdict["score"] if getattr(cfg.actor, "ifeval_partial_credit", True) else 0.0
    status = "wrong" if verdict["answer_status"] == "partial" else verdict["answer_status"]
    return judged(cfg, llm, llm_call, problem, status, latency, score=credit)


def load_problems(dataset_names, *, max_constraints: int | None = None, test_size: int = 1, **_) -> list[dict]:
    task = "Write about the sun. Say 'warm' and 'light'."
    return [{"task": task, "reward_context": {"words": ["warm", "light"]}, "dataset": name} for name in dataset_names]
