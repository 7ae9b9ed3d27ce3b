"""The rollout of domains with one question and one answer: ask once, judge, reward by the table.

``cfg.actor`` may set a ``system_prompt``, a ``task_template`` that contains ``{task}``, and a ``discount_factor`` per
sampled token.
"""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.columns import Messages
from pipelinerl.domains.rewards import VerdictRewards
from pipelinerl.domains.verifier_client import judged
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult

JudgeOutput = Callable[[str], Verdict | Awaitable[Verdict]]
"""The model's whole output → verdict."""


def conversation(cfg: DictConfig, task: str | Messages, system_prompt: str | None = None) -> Messages:
    """Builds the messages that ask ``task``. If it is messages, ``actor.task_template`` applies to the last one.

    ``actor.system_prompt`` replaces ``system_prompt``; an empty text removes it. Messages with a system prompt keep it.

    Raises:
        DomainError: ``actor.task_template`` has no place for the task.
    """
    actor = cfg.get("actor") or {}
    system = system_prompt if actor.get("system_prompt") is None else actor.get("system_prompt")
    template = actor.get("task_template") or "{task}"
    if "{task}" not in template:
        raise DomainError(f"`actor.task_template` is {template!r}: it must hold {{task}}, the problem's question")
    *before, last = [{"role": "user", "content": task}] if isinstance(task, str) else task
    asked = [*before, last | {"content": template.replace("{task}", last["content"])}]
    has_own = asked[0]["role"] in ("system", "developer")
    return [{"role": "system", "content": system}, *asked] if system and not has_own else asked


async def ask_and_judge(
    cfg: DictConfig,
    llm: TrainableLLM,
    problem: dict[str, Any],
    session: aiohttp.ClientSession,
    *,
    task: str | Messages,
    judge: JudgeOutput,
    system_prompt: str | None = None,
) -> RolloutResult:
    """Runs one rollout: samples an answer, judges it and rewards it.

    Args:
        cfg: the run's configuration.
        llm: the policy.
        problem: its ``dataset`` groups the metrics.
        session: HTTP session of the rollout.
        task: the question, a text or messages.
        judge: judges the output. May be async.
        system_prompt: the domain's, which the configuration may replace.
    Raises:
        VerifierError: the judge failed. A failure is never a reward.
    """
    started = time.monotonic()
    llm_call = await llm_async_generate(llm, Prompt(messages=conversation(cfg, task, system_prompt)), session)
    verdict = judge(llm_call.output.content or "")
    if inspect.isawaitable(verdict):
        verdict = await verdict
    text = make_training_text(llm, llm_call)
    metrics = VerdictRewards.of(cfg).metrics(judged(verdict), finished=text.finished)
    discount = (cfg.get("actor") or {}).get("discount_factor", 1.0)
    text.reward = metrics.reward = metrics.reward * discount**text.output_tokens
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
