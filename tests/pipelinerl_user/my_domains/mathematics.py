import random
import time

import aiohttp
from omegaconf import DictConfig

from my_domains.rewarding import judged, prompt_of
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.domains.math import verify_answer_rpc
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.utils import get_environment_jobs, resolve_environment_key
from pipelinerl.world import Job


async def generate_math_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    time_start = time.time()
    llm_call = await llm_async_generate(llm, prompt_of(cfg, problem["task"]), session)
    latency = time.time() - time_start
    assert llm_call.output.content is not None
    env_jobs: list[Job] = get_environment_jobs(cfg, resolve_environment_key(cfg, default="math"))
    if not env_jobs:
        raise RuntimeError("No environment servers available for math domain")
    env_job = random.choice(env_jobs)
    assert env_job.port is not None
    answer_status = await verify_answer_rpc(
        session=session,
        host=env_job.hostname,
        port=env_job.port,
        prediction=llm_call.output.content,
        gold=problem["answer"],
        strict=True,
    )
    return judged(cfg, llm, llm_call, problem, answer_status, latency)


def load_datasets(dataset_names: list[str] | str | None, seed: int | None = None) -> list[dict]:
    rows = [("What is 2 + 3?", "5"), ("Make 8 of 2, 4 and *. Use \\boxed{}.", "countdown-8-[2, 4]")]
    return [
        {"task": t, "answer": a, "dataset": n, "id": i} for n in dataset_names or [] for i, (t, a) in enumerate(rows)
    ]
