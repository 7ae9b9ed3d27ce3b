"""The rollout of a task with tools: calls the policy until an answer calls no tool, and judges that answer.

Every turn gets the rollout's reward.
"""

import re
import time
from collections.abc import Awaitable, Callable
from fractions import Fraction
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.answer_tag import last_answer
from pipelinerl.domains.rewards import VerdictRewards
from pipelinerl.domains.single_turn import conversation
from pipelinerl.llm import LLMCall, Prompt, ToolCall, TrainableLLM
from pipelinerl.records.verdicts import Verdict, correct, no_answer, unparsable, wrong
from pipelinerl.rollouts import BaseMetrics, RolloutResult, apply_rollout_reward

SYSTEM_PROMPT = "Use the tools where they help. When you know the answer, give it as <answer>number</answer>."
MAX_ANSWER_CHARS = 100
"""A longer answer is a sentence, not a number or a name."""
MAX_RESULT_CHARS = 2000
"""About 500 tokens, so that the results of `DEFAULT_MAX_TURNS` fit a context of 4,096 tokens beside the answers."""
NUMBER = re.compile(r"[-+]?[0-9]{1,50}(?:\.[0-9]{1,50}|/[0-9]{1,50})?", re.ASCII)
DEFAULT_MAX_TURNS = 6
"""Default of `max_turns`."""


class ToolUseMetrics(BaseMetrics):
    num_turns: int
    num_tool_calls: int
    num_tool_errors: int


def judge(text: str, answer: str) -> Verdict:
    """Judges the last answer in tags. Numbers are compared exactly, other references as text, ignoring case."""
    found = (last_answer(text) or "").strip()
    if not 0 < len(found) <= MAX_ANSWER_CHARS:
        return no_answer()
    given, expected = as_number(found), as_number(answer)
    if expected is None:
        return correct() if found.casefold() == answer.strip().casefold() else wrong()
    if given is None:
        return unparsable("not a number")
    return correct() if given == expected else wrong()


def as_number(text: str) -> Fraction | None:
    plain = text.strip().replace(",", "")
    if not NUMBER.fullmatch(plain) or (plain.rpartition("/")[2].strip("0") == "" and "/" in plain):
        return None
    return Fraction(plain)


async def answer_with_tools(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    *,
    tools: list[dict[str, Any]],
    call_tool: Callable[[ToolCall], Awaitable[str]],
    max_turns: int,
    judge: Callable[[str, str], Verdict] = judge,
) -> RolloutResult:
    """Asks the problem's task until an answer calls no tool, and judges that answer.

    Args:
        cfg: the run's configuration.
        llm: the policy.
        problem: ``task`` and ``answer``.
        session: HTTP session of the rollout.
        tools: descriptions in OpenAI's format.
        call_tool: runs a tool and returns the text for the policy. A result that contains "error: " counts as an error.
        max_turns: maximum number of LLM calls.
        judge: (the last answer, the problem's answer) → verdict.
    """
    started = time.monotonic()
    messages = conversation(cfg, problem["task"], SYSTEM_PROMPT)
    calls: list[LLMCall] = []
    results: list[str] = []
    for _ in range(max_turns):
        calls.append(await llm_async_generate(llm, Prompt(messages=list(messages), tools=tools), session))
        output = calls[-1].output
        messages.append(output.to_message())
        if not output.tool_calls:
            break
        for tool_call in output.tool_calls:
            results.append(await call_tool(tool_call))
            messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": results[-1]})
    texts = [make_training_text(llm, call) for call in calls]
    verdict = judge(calls[-1].output.content or "", problem["answer"])
    table = VerdictRewards.of(cfg)
    metrics = table.metrics(verdict, finished=texts[-1].finished)
    apply_rollout_reward(texts, metrics.reward)
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
