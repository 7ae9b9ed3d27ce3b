"""Programs, judged by SandboxFusion through its own client."""

import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig
from sandbox_fusion import RunCodeRequest, run_code_async, set_sandbox_endpoint

from my_domains.rewarding import judged, prompt_of
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


async def run_in_sandbox(code: str, endpoint: str, seconds: float) -> str:
    """Standard output of the program, or "" """
    set_sandbox_endpoint(endpoint)
    response = await run_code_async(RunCodeRequest(code=code, language="python", run_timeout=seconds))
    return response.run_result.stdout.strip() if response.run_result else ""


async def generate_coding_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    start_time = time.time()
    llm_call = await llm_async_generate(llm, prompt_of(cfg, problem["task"]), session)
    latency = time.time() - start_time
    found = BLOCK.search(llm_call.output.content or "")
    tests = problem["reward_context"]["outputs"][: getattr(cfg, "max_tests_per_problem", 15)]
    if found is None:
        return judged(cfg, llm, llm_call, problem, "no_answer", latency)
    printed = await run_in_sandbox(found.group(1), cfg.sandbox_endpoint, getattr(cfg, "sandbox_timeout", 5.0))
    passed = sum(printed == expected for expected in tests)
    status = "correct" if passed == len(tests) else "wrong"
    return judged(cfg, llm, llm_call, problem, status, latency)


def load_problems(dataset_names: list[str], *, subset: str = "train", max_examples: int | None = None, **_: Any):
    wanted = [("Write a program that prints 6.", ["6"]), ("Write a program that prints 4.", ["4"])]
    return [
        {"task": task, "reward_context": {"outputs": outputs}, "dataset": f"{name}_{subset}"}
        for name in dataset_names
        for task, outputs in wanted[:max_examples]
    ]
