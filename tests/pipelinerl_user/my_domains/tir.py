"""Mathematics with a tool that runs Python and one that hands the answer in."""

import json
import random
import time

import aiohttp
from omegaconf import DictConfig

from my_domains.coding import run_in_sandbox
from pipelinerl.async_llm import llm_async_generate, make_training_texts_from_llm_calls
from pipelinerl.domains.math import RewardTable, get_reward, verify_answer_rpc
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.utils import get_environment_jobs, resolve_environment_key

MIN_GENERATION_TOKENS = 16


class Metrics(BaseMetrics):
    num_python_calls: int = 0
    num_steps: int = 0
    overflow: bool = False


def tool(name: str, argument: str) -> dict:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [tool("run_python_code", "code"), tool("MathAnswer", "answer")]


def room(cfg: DictConfig, llm: TrainableLLM, messages: list[dict]) -> int:
    """Tokens that the context leaves for the next answer."""
    llm.load_tokenizer()
    prompt = llm.tokenizer.apply_chat_template(
        messages, add_special_tokens=True, add_generation_prompt=True, tools=TOOLS, return_dict=False
    )
    longest = int(cfg.vllm_config.vllm_kwargs.get("max_model_len", 32000))
    return min(int(llm.parameters.get("max_tokens", 16000)), longest - len(prompt))


async def play(cfg: DictConfig, llm: TrainableLLM, messages: list[dict], session: aiohttp.ClientSession):
    """(calls, answer or None, number of programs)"""
    llm_calls, programs = [], 0
    for _ in range(int(getattr(cfg.actor, "agent_max_loops", 3))):
        left = room(cfg, llm, messages)
        if left < MIN_GENERATION_TOKENS:
            break
        prompt = Prompt(messages=list(messages), tools=TOOLS)
        llm_call = await llm_async_generate(llm, prompt, session, max_tokens_override=left)
        llm_calls.append(llm_call)
        if not llm_call.output.tool_calls:
            return llm_calls, None, programs
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in llm_call.output.tool_calls
        ]
        messages.append({"role": "assistant", "content": llm_call.output.content or "", "tool_calls": calls})
        for tc in llm_call.output.tool_calls:
            arguments = json.loads(tc.function.arguments)
            if tc.function.name == "MathAnswer":
                return llm_calls, str(arguments.get("answer", "")), programs
            programs += 1
            content = await run_in_sandbox(arguments.get("code", ""), cfg.sandbox_endpoint, float(cfg.sandbox_timeout))
            messages.append({"role": "tool", "tool_call_id": tc.id, "content": content})
    return llm_calls, None, programs


async def generate_tir_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    start = time.perf_counter()
    messages = [{"role": "user", "content": cfg.actor.task_template.format(task=problem["task"])}]
    llm_calls, answer, programs = await play(cfg, llm, messages, session)
    env_job = random.choice(get_environment_jobs(cfg, resolve_environment_key(cfg, default="math")))
    prediction = answer if answer is not None else (llm_calls[-1].output.content or "") if llm_calls else ""
    answer_status = await verify_answer_rpc(
        session=session, host=env_job.hostname, port=env_job.port, prediction=prediction, gold=problem["answer"]
    )
    reward = get_reward(answer_status, answer is not None, RewardTable(**dict(cfg.rewards)))
    shaping = getattr(cfg, "python_tool_shaping", None)
    if shaping is not None and answer_status == "correct" and programs:
        reward += float(getattr(shaping, "bonus_on_correct_with_python", 0.0))
    training_texts = make_training_texts_from_llm_calls(llm, llm_calls, reward=reward)
    for text in training_texts:
        text.finished = answer is not None
    metrics = Metrics(
        reward=reward,
        success=answer_status == "correct",
        no_error=answer_status != "unparsable",
        no_answer=answer_status == "no_answer",
        num_python_calls=programs,
        num_steps=len(llm_calls),
        overflow=answer is None,
    )
    return RolloutResult(
        training_texts=training_texts,
        metrics=metrics,
        latency=time.perf_counter() - start,
        dataset_name=problem.get("dataset"),
        domain="tir",
    )


def load_problems(dataset_names: list[str]) -> list[dict]:
    return [{"task": "What is 3 * 3?", "answer": "9", "dataset": name} for name in dataset_names]
