"""Plays a Gymnasium environment whose observations and actions are text."""

import inspect
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp

from pipelinerl.agents.run import in_thread
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


class TextEnvironment(Protocol):
    """The part of ``gymnasium.Env`` that is used. The methods may be coroutine functions."""

    def reset(self, *, seed: int | None = None) -> Any:
        """Returns (observation, information)."""
        ...

    def step(self, action: Any, /) -> Any:
        """Returns (observation, reward, terminated, truncated, information)."""
        ...


async def play_text_environment(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    environment: TextEnvironment,
    *,
    max_turns: int,
    seed: int | None = None,
    system: str | None = None,
    parse_action: Callable[[str], Any] = str.strip,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Plays one episode. Observations become user messages, and the model's answers become actions.

    The reward is the sum over the episode. Success is ``info["success"]`` of the last step if the environment sets it,
    else a positive sum. All turns become one training sequence.

    Args:
        llm: the policy.
        session: HTTP session of the rollout.
        environment: runs in a thread, or on this loop if its methods are coroutine functions. The caller closes it.
        max_turns: maximum number of steps.
        seed: for ``environment.reset``.
        system: system message. None: no system message.
        parse_action: turns an answer into an action.
        dataset_name: groups the metrics.
    """
    observation, info = await _call(environment.reset, seed=seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": str(observation)})
    started, texts, total = time.monotonic(), [], 0.0
    for _ in range(max_turns):
        call = await llm_async_generate(llm, Prompt(messages=list(messages)), session)
        texts.append(make_training_text(llm, call))
        content = call.output.content or ""
        observation, reward, terminated, truncated, info = await _call(environment.step, parse_action(content))
        total += float(reward)
        if terminated or truncated:
            break
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": str(observation)}]
    for text in texts:
        text.reward = total
    success = bool(info.get("success", total > 0))
    metrics = BaseMetrics(reward=total, success=success, no_error=True, no_answer=False)
    return RolloutResult(
        training_texts=texts,
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=dataset_name,
        rewards="rollout",
    )


async def _call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    return await in_thread(method, *args, **kwargs)
