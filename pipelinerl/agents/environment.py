"""Plays a Gymnasium environment whose observations and actions are text.

After a crash the answers come from the journal, and steps are taken again. An environment whose steps must not be, or
do something else the next time, has methods ``snapshot`` and ``restore``: then its steps come from a file.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from pipelinerl.agents.run import in_thread
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult, apply_rollout_reward
from pipelinerl.world.disk import replace_file

log = logging.getLogger(__name__)
WRITE_TIMEOUT_S = 5.0
"""Longest wait for a step to be kept: a slow disk is no error."""


class TextEnvironment(Protocol):
    """The part of ``gymnasium.Env`` that is used. The methods may be coroutine functions.

    Optional: ``snapshot() -> bytes`` after ``reset`` and every step, and ``restore(snapshot: bytes)`` of a new object
    in the place of ``reset``, when a crash has interrupted the episode.
    """

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
    kept = KeptEnvironment(environment, llm.state.environment_file)
    llm.state.environment_file = None  # of the rollout's first episode
    observation = (await kept.reset(seed)).observation
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": observation})
    started, texts, total = time.monotonic(), [], 0.0
    success: bool | None = None
    for _ in range(max_turns):
        call = await llm_async_generate(llm, Prompt(messages=list(messages)), session)
        texts.append(make_training_text(llm, call))
        content = call.output.content or ""
        step = await kept.step(parse_action(content))
        total, success = total + step.reward, step.success
        if step.is_last:
            break
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": step.observation}]
    apply_rollout_reward(texts, total)
    metrics = BaseMetrics(
        reward=total, success=total > 0 if success is None else success, no_error=True, no_answer=False
    )
    return RolloutResult(
        training_texts=texts,
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=dataset_name,
        rewards="rollout",
    )


class KeptStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a step returned, or ``reset``."""

    action: str
    """Its representation. Of ``reset``: none."""
    observation: str
    reward: float = 0.0
    is_last: bool = False
    success: bool | None = None
    """None: the environment does not say."""


class KeptSteps(msgspec.Struct, frozen=True):
    """The content of an environment's file."""

    steps: list[KeptStep]
    """All steps so far."""
    snapshot: bytes
    """The environment after them."""


class KeptEnvironment:
    """Returns the steps that a file keeps, then takes further ones in the environment that it restores.

    Args:
        environment: a new one.
        path: the file. None: nothing is kept.
    """

    def __init__(self, environment: TextEnvironment, path: Path | None):
        self._environment: Any = environment
        self._path = path if hasattr(environment, "snapshot") and hasattr(environment, "restore") else None
        self._steps: list[KeptStep] = []
        self._left: list[KeptStep] = []
        """Steps of the file that are not returned yet."""
        self._snapshot: bytes | None = None
        """To restore before the next step that is taken."""

    async def reset(self, seed: int | None) -> KeptStep:
        if self._path is not None:
            await self._read(self._path)
        if self._left:
            return self._replay("")
        observation, _ = await _call(self._environment.reset, seed=seed)
        return await self._keep(KeptStep(action="", observation=str(observation)))

    async def step(self, action: Any) -> KeptStep:
        if self._left:
            return self._replay(repr(action))
        if self._snapshot is not None:
            await _call(self._environment.restore, self._snapshot)
            self._snapshot = None
        observation, reward, terminated, truncated, info = await _call(self._environment.step, action)
        success = bool(info["success"]) if "success" in info else None
        step = KeptStep(
            action=repr(action),
            observation=str(observation),
            reward=float(reward),
            is_last=bool(terminated or truncated),
            success=success,
        )
        return await self._keep(step)

    async def _read(self, path: Path) -> None:
        """Reads the file. A damaged one is as none: its steps are taken again."""
        try:
            kept = msgspec.msgpack.decode(await in_thread(path.read_bytes), type=KeptSteps)
            self._left, self._snapshot = kept.steps, kept.snapshot
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("event=environment_not_restored file=%s reason=%r: its steps are taken again", path, error)

    def _replay(self, action: str) -> KeptStep:
        step = self._left.pop(0)
        if step.action != action:  # answers were lost that the environment was told
            assert self._path
            self._path.unlink()
            raise TransportError("the environment's steps are kept, but not their answers: the rollout starts anew")
        self._steps.append(step)
        return step

    async def _keep(self, step: KeptStep) -> KeptStep:
        self._steps.append(step)
        if self._path is None:
            return step
        snapshot = await _call(self._environment.snapshot)
        if not isinstance(snapshot, bytes):
            name = type(self._environment).__name__
            raise DomainError(f"{name}.snapshot returned {type(snapshot).__name__}: it must return bytes")
        content = msgspec.msgpack.encode(KeptSteps(self._steps, snapshot))
        try:
            await asyncio.wait_for(in_thread(replace_file, self._path, content, mode=0o600), WRITE_TIMEOUT_S)
        except (OSError, TimeoutError) as error:
            log.warning("event=environment_not_kept file=%s reason=%r", self._path, error)
            self._path = None
        return step


async def _call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args, **kwargs)
    return await in_thread(method, *args, **kwargs)
