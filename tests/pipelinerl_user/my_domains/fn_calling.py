"""Calls of functions as text, judged by a server of the domain's own."""

import json
import re
import time
from typing import Any

import aiohttp
from omegaconf import DictConfig

from my_domains.rewarding import judged
from my_domains.serving import ask, serve
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult

CALLS = re.compile(r"<tool_calls>(.*?)</tool_calls>", re.DOTALL)


def verify_fn_calling_answer(generation: str, reward_context: dict, tool_calls: list | None) -> dict[str, Any]:
    found = CALLS.search(generation)
    if found is None and not tool_calls:
        return {"answer_status": "no_answer", "partial_score": 0.0}
    try:
        calls = json.loads(found.group(1)) if found else tool_calls
        right = sum(call in calls for call in reward_context["calls"]) / len(reward_context["calls"])
    except (ValueError, TypeError):
        return {"answer_status": "unparsable", "partial_score": 0.0}
    return {"answer_status": "correct" if right == 1 else "wrong", "partial_score": right}


class BFCLEnvironment:
    def __init__(self, max_workers: int = 4):
        self.max_workers = max_workers

    def launch(self, port: int) -> None:
        serve(port, lambda body: verify_fn_calling_answer(**body))


async def generate_fn_calling_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    tools = [tool.get("function", tool) for tool in problem.get("extra_info", {}).get("oai_tools", [])]
    task = cfg.actor.get("task_template", "{task}").format(task=problem["task"])
    system = {"role": "system", "content": cfg.actor.get("system_prompt", "") + json.dumps(tools)}
    messages = [system, {"role": "user", "content": task}]
    start_time = time.time()
    llm_call = await llm_async_generate(llm, Prompt(messages=messages, tools=None), session)
    latency = time.time() - start_time
    assert llm_call.output.content is not None
    called = None
    if hasattr(llm_call.output, "tool_calls") and llm_call.output.tool_calls:
        called = [{"name": call.function.name, "id": getattr(call, "id", None)} for call in llm_call.output.tool_calls]
    body = {
        "generation": llm_call.output.content,
        "reward_context": problem.get("reward_context", {}),
        "tool_calls": called,
    }
    verdict = await ask(cfg, session, "fn_calling", body)
    return judged(cfg, llm, llm_call, problem, verdict["answer_status"], latency, score=verdict["partial_score"])


def load_problems(dataset_names: list[str], *, categories: list[str], seed: int | None = None, **_: Any) -> list[dict]:
    call = {"name": "add", "arguments": {"a": 2}}
    context = {"extra_info": {"oai_tools": [{"function": {"name": "add"}}]}, "reward_context": {"calls": [call]}}
    return [{"task": f"Add 2 ({kind}).", "dataset": name, **context} for name in dataset_names for kind in categories]
