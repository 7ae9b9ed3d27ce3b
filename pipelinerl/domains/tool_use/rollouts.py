"""A conversation in which the model may call tools before it answers. Every turn gets the rollout's reward."""

import re
import time
from fractions import Fraction
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.coding.rollouts import runner_of
from pipelinerl.domains.rewards import VerdictRewards
from pipelinerl.domains.tool_use.tools import TOOLS, call_tool
from pipelinerl.llm import LLMCall, Prompt, TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, unparsable, wrong
from pipelinerl.rollouts import BaseMetrics, RolloutResult

required_problem_keys = ("task", "answer")

SYSTEM_PROMPT = "Use the tools where they help. When you know the answer, give it as <answer>number</answer>."
ANSWER = re.compile(r"<answer>\s*(.{1,100}?)\s*</answer>", re.DOTALL)
NUMBER = re.compile(r"[-+]?[0-9]{1,50}(?:\.[0-9]{1,50}|/[0-9]{1,50})?", re.ASCII)
DEFAULT_MAX_TURNS = 6


class ToolUseMetrics(BaseMetrics):
    num_turns: int
    num_tool_calls: int
    num_tool_errors: int


def judge(text: str, answer: str) -> Verdict:
    """Judges the last answer. A numeric reference is compared exactly, any other as text without regard to case."""
    found = ANSWER.findall(text)
    if not found:
        return no_answer()
    given, expected = as_number(found[-1]), as_number(answer)
    if expected is None:
        return correct() if found[-1].casefold() == answer.strip().casefold() else wrong()
    if given is None:
        return unparsable("not a number")
    return correct() if given == expected else wrong()


def as_number(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "")
    if not NUMBER.fullmatch(plain) or (plain.rpartition("/")[2].strip("0") == "" and "/" in plain):
        return None
    return Fraction(plain)


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. ``cfg.environment`` may set ``tools`` (names, default all) and ``max_turns`` (LLM calls)."""
    started = time.monotonic()
    settings = cfg.get("environment") or {}
    tools = [TOOLS[name] for name in settings.get("tools", list(TOOLS))]
    runner = runner_of(cfg, session)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem["task"]},
    ]
    calls: list[LLMCall] = []
    results: list[str] = []
    for _ in range(settings.get("max_turns", DEFAULT_MAX_TURNS)):
        calls.append(await llm_async_generate(llm, Prompt(messages=list(messages), tools=tools), session))
        output = calls[-1].output
        messages.append(output.to_message())
        if not output.tool_calls:
            break
        for tool_call in output.tool_calls:
            results.append(await call_tool(tool_call, runner))
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": results[-1]})
    texts = [make_training_text(llm, call) for call in calls]
    verdict = judge(calls[-1].output.content or "", problem["answer"])
    table = VerdictRewards.of(cfg)
    metrics = table.metrics(verdict, finished=texts[-1].finished)
    for text in texts:
        text.reward = metrics.reward
    return RolloutResult(
        training_texts=texts,
        metrics=ToolUseMetrics(
            **metrics.model_dump(),
            num_turns=len(calls),
            num_tool_calls=len(results),
            num_tool_errors=sum("error: " in result for result in results),
        ),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
