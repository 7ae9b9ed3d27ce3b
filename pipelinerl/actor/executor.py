"""The executor in a worker runs groups with the domains' functions, all attempts of a group concurrently.

It consumes ``StartGroup``. It produces each attempt's rollout or failure as soon as the attempt ends, then
``GroupEnded``. Every attempt has a deadline. A failure is typed and never becomes a reward, even if the domain's code
swallows the exception.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.actor import failures
from pipelinerl.actor.messages import (
    Failure,
    FromWorker,
    GroupEnded,
    RolloutDone,
    RolloutFailed,
    StartGroup,
)
from pipelinerl.actor.sequences import to_rollout
from pipelinerl.actor.servers import ServerPool
from pipelinerl.actor.transport import Client, GroupRoute, GroupTransport, JoinPolicy, is_cancelled
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.errors import DomainError
from pipelinerl.llm import RolloutState, TrainableLLM
from pipelinerl.observability import spans
from pipelinerl.records import Rollout
from pipelinerl.rollouts import RewardMode, RolloutResult

RolloutFunction = Callable[[DictConfig, TrainableLLM, dict, aiohttp.ClientSession], Awaitable[RolloutResult]]
TakeOutcome = Callable[[Rollout | Failure], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    """The configuration's settings for a rollout."""

    timeout_s: float
    seq_length: int
    rewards: RewardMode = "rollout"


class Executor:
    """Runs groups with the domains' functions.

    Args:
        cfg: the run's configuration, passed to the functions.
        functions: rollout functions, by index of the domain.
        llms: language models for training and for evaluation.
        client: sends the requests.
        rules: limits of a rollout.
    """

    def __init__(
        self,
        cfg: DictConfig,
        functions: list[RolloutFunction],
        llms: tuple[TrainableLLM, TrainableLLM],
        client: Client,
        rules: RolloutRules,
    ):
        self._cfg = cfg
        self._functions = functions
        self._train_llm, self._eval_llm = llms
        self._client, self._rules = client, rules
        self._policy = JoinPolicy()
        self.servers = ServerPool()

    async def stream_group(self, start: StartGroup, report: TakeOutcome) -> int:
        """Reports every attempt as it ends. Returns how many requests ended without a completion.

        An attempt ends only when its report has been accepted, so a slow reader slows the rollouts down instead of
        filling memory.
        """
        route = GroupRoute(self.servers, self._client, len(start.attempts), start.version)
        join_limit = min(len(start.attempts), self._client.limits.max_completions)
        temperature = None if start.evaluation else self._train_llm.parameters.get("temperature", 1.0)
        transport = GroupTransport(route, self._policy, join_limit, temperature)

        async def run(attempt: int, server_url: str) -> None:
            llm = self._llm(start, attempt, transport, server_url)
            await report(await self._run_attempt(start, attempt, llm, route))

        try:
            server = await route.settle()
            async with asyncio.TaskGroup() as group:
                for attempt in start.attempts:
                    group.create_task(run(attempt, server.url))
        finally:
            transport.close()
        return route.aborted_requests

    async def _run_attempt(
        self, start: StartGroup, attempt: int, llm: TrainableLLM, route: GroupRoute
    ) -> Rollout | Failure:
        function = self._functions[start.domain]
        started, began = time.monotonic(), time.time_ns()
        trace = f"{start.group_id}/{attempt}"
        try:
            async with asyncio.timeout(self._rules.timeout_s) as deadline:
                result = await function(self._cfg, llm, start.problem, self._client.session)
            if llm.state.failure is not None:
                raise llm.state.failure
            rollout = self._checked(result, start, attempt, llm, time.monotonic() - started)
            if not isinstance(rollout, Rollout):
                return rollout
            spans.record("rollout", trace, began, root=True, reward=rollout.reward, evaluation=start.evaluation)
            used = route.used
            return msgspec.structs.replace(rollout, servers=tuple(used), probes_missed=tuple(used.values()))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a domain's code may raise anything
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            cause = llm.state.failure or error
            if deadline.expired():
                cause = TimeoutError(f"no result within actor.rollout_timeout_s={self._rules.timeout_s}")
            reason = failures.classify(cause)
            detail = failures.describe_failure(cause, function_name(function), start.problem)
            spans.record("rollout", trace, began, failed=reason)
            return Failure(attempt=attempt, reason=reason, detail=detail, latency_s=time.monotonic() - started)

    def _llm(self, start: StartGroup, attempt: int, transport: GroupTransport, server_url: str) -> TrainableLLM:
        """Makes the language model of one attempt."""
        template = self._eval_llm if start.evaluation else self._train_llm
        llm = template.model_copy(update={"base_url": server_url, "parameters": dict(template.parameters)})
        llm.bind(RolloutState(transport, turns=[], generate=llm_async_generate, name=f"{start.group_id}/{attempt}"))
        return llm

    def _checked(
        self, result: Any, start: StartGroup, attempt: int, llm: TrainableLLM, latency_s: float
    ) -> Rollout | Failure:
        if not isinstance(result, RolloutResult):
            raise DomainError(
                f"{function_name(self._functions[start.domain])} returned {type(result).__name__}: "
                "it must return a pipelinerl.rollouts.RolloutResult"
            )
        rollout = to_rollout(
            result,
            attempt=attempt,
            latency_s=latency_s,
            num_llm_calls=llm.state.num_calls,
            sent_tokens=llm.state.sent_tokens,
            cached_tokens=llm.state.cached_tokens,
            fallback_version=start.version,
            seq_length=self._rules.seq_length,
            rewards=self._rules.rewards,
        )
        if not rollout.sequences and not start.evaluation:
            detail = f"{function_name(self._functions[start.domain])} returned no sampled token to train on"
            return Failure(attempt=attempt, reason=failures.EMPTY, detail=detail, latency_s=latency_s)
        return rollout


def function_name(function: Callable) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


class GroupTasks:
    """The running groups of a worker, by ticket. An error outside a domain's function ends the task group ``tasks``."""

    def __init__(self, executor: Executor, send: Callable[[FromWorker], Awaitable[None]], tasks: asyncio.TaskGroup):
        self._executor, self._send, self._tasks = executor, send, tasks
        self._groups: dict[int, asyncio.Task] = {}

    def start(self, start: StartGroup) -> None:
        self._groups[start.ticket] = self._tasks.create_task(self._run(start))

    def cancel(self, ticket: int) -> None:
        group = self._groups.pop(ticket, None)
        if group is not None:
            group.cancel()

    def close(self) -> None:
        for ticket in list(self._groups):
            self.cancel(ticket)

    async def _run(self, start: StartGroup) -> None:
        ticket = start.ticket

        async def report(outcome: Rollout | Failure) -> None:
            if isinstance(outcome, Rollout):
                await self._send(RolloutDone(ticket=ticket, rollout=outcome))
            else:
                await self._send(RolloutFailed(ticket=ticket, failure=outcome))

        aborted_requests = await self._executor.stream_group(start, report)
        await self._send(GroupEnded(ticket=ticket, aborted_requests=aborted_requests))
        self._groups.pop(ticket, None)
