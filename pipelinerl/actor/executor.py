"""Runs groups in a worker with the domains' functions, all attempts of a group concurrently.

A failure is typed and never becomes a reward, even if the domain's code swallows the exception.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.actor import failures
from pipelinerl.actor.answer_journal import AnswerJournal, AttemptFile, AttemptTransport
from pipelinerl.actor.growth import FOLLOW_S, Growth
from pipelinerl.actor.messages import Failure, FromWorker, GroupEnded, RolloutDone, RolloutFailed, StartGroup
from pipelinerl.actor.router import Client, GroupRoute, GroupTransport, JoinPolicy, is_cancelled
from pipelinerl.actor.sequences import to_rollout
from pipelinerl.actor.servers import ServerLoads
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.errors import DomainError
from pipelinerl.llm import RolloutState, TrainableLLM, Transport
from pipelinerl.observability import spans
from pipelinerl.records import Rollout
from pipelinerl.records.drops import DropReason
from pipelinerl.rollouts import MASKED_TOKEN_ID, RewardMode, RolloutResult, check_named_rewards

log = logging.getLogger(__name__)

RolloutFunction = Callable[[DictConfig, TrainableLLM, dict, aiohttp.ClientSession], Awaitable[RolloutResult]]
TakeOutcome = Callable[[Rollout | Failure], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    """The configuration's settings for a rollout."""

    timeout_s: float
    seq_length: int
    rewards: RewardMode = "rollout"
    named_rewards: tuple[str, ...] = ()
    """Metrics that every training rollout reports, because they are its rewards."""
    hinted: frozenset[int] = frozenset()
    """Indices of the domains whose teacher sees the problem's `hint`."""


class RolloutLimit:
    """Ends a rollout at its time limit, unless the answer that it then waits for is growing.

    Args:
        deadline: of the rollout. It is set to now when the limit is reached.
        answer: returns the answer that the rollout waits for, if any.
    """

    def __init__(self, deadline: asyncio.Timeout, limit_s: float, answer: Callable[[], Growth | None]):
        self._deadline, self._limit_s, self._answer = deadline, limit_s, answer
        self._last: Growth | None = None
        self._answered: float | None = None
        """When the last answer had come."""

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._check)

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        if self._may_go_on(time.monotonic()):
            self._timer = loop.call_later(min(FOLLOW_S, self._limit_s), self._check)
        else:
            self._deadline.reschedule(loop.time())

    def _may_go_on(self, now: float) -> bool:
        # the answer under way at the limit is awaited and may be used for as long again, so that long answers are as
        # likely to be trained as short ones. A further one is not, so a rollout that asks for ever ends
        answer = self._answer()
        if answer is None:
            if self._last is not None and self._answered is None:
                self._answered = now
            return self._answered is not None and now - self._answered < self._limit_s
        if self._last is None:
            self._last = answer
        return answer is self._last and answer.is_growing(now)


class Executor:
    """Runs groups with the domains' functions.

    Args:
        functions: rollout functions, by index of the domain.
        llms: language models for training and for evaluation.
        answers: journal of the answers of training problems. None: nothing outlives a crash.
        session: what the functions get for their own requests. None: the client's.
    """

    def __init__(
        self,
        cfg: DictConfig,
        functions: list[RolloutFunction],
        llms: tuple[TrainableLLM, TrainableLLM],
        client: Client,
        rules: RolloutRules,
        answers: AnswerJournal | None = None,
        session: aiohttp.ClientSession | None = None,
    ):
        self._cfg = cfg
        self._functions = functions
        self._train_llm, self._eval_llm = llms
        self._client, self._rules, self._answers = client, rules, answers
        self._session = session or client.session
        self._policy = JoinPolicy()
        self._domains: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self.servers = ServerLoads()
        self.ended = 0
        """Attempts at training problems that have ended."""

    async def stream_group(self, start: StartGroup, report: TakeOutcome) -> int:
        """Reports every attempt as it ends. Returns how many requests ended without a completion."""
        route = GroupRoute(self.servers, self._client, len(start.attempts), start.version)
        join_limit = min(len(start.attempts), self._client.limits.max_completions)
        temperature = None if start.evaluation else self._train_llm.parameters.get("temperature", 1.0)
        transport = GroupTransport(route, self._policy, join_limit, temperature)
        files: dict[int, AttemptFile] = {}

        async def run(attempt: int, server_url: str) -> None:
            outcome = await self._run_attempt(start, attempt, server_url, route, transport, files.get(attempt))
            route.end_attempt()
            self.ended += not start.evaluation
            await report(outcome)  # a slow reader slows the rollouts down instead of filling memory

        try:
            server = await route.choose_server()
            if self._answers is not None and not start.evaluation:
                files = await self._answers.open(start.group_id, start.attempts)
            async with asyncio.TaskGroup() as group:
                for attempt in start.attempts:
                    self._domains[group.create_task(run(attempt, server.url))] = start.domain
        finally:
            transport.close()
        return route.aborted_requests

    def domain_of(self, task: asyncio.Task[Any]) -> int | None:
        """Returns the index of the domain whose attempt the task runs. None: it runs none. For any thread."""
        return self._domains.get(task)

    async def _run_attempt(
        self,
        start: StartGroup,
        attempt: int,
        server_url: str,
        route: GroupRoute,
        transport: GroupTransport,
        file: AttemptFile | None,
    ) -> Rollout | Failure:
        """Plays an attempt, first with its recorded answers. If its requests differ, it starts anew without them."""

        async def play(carrier: Transport, oldest: int) -> Rollout | Failure:
            llm = self._llm(start, attempt, carrier, server_url)
            return await self._play(msgspec.structs.replace(start, version=oldest), attempt, llm, route, transport)

        if file is None:
            return await play(transport, start.version)
        recording = AttemptTransport(file, transport, route)
        played = await play(recording, min([start.version, *recording.versions]))
        await recording.end()
        ended = isinstance(played, Rollout) or not played.reason.repeats
        diverged = recording.has_diverged(ended)
        if diverged:
            log.warning("event=rollout_diverged id=%s/%d recorded=%d", start.group_id, attempt, len(file.answers))
            file.clear()
            recording = AttemptTransport(file, transport, route)
            played = await play(recording, start.version)
        if isinstance(played, Failure):
            return played
        return msgspec.structs.replace(played, answers_from_journal=recording.num_taken, diverged=diverged)

    async def _play(
        self, start: StartGroup, attempt: int, llm: TrainableLLM, route: GroupRoute, transport: GroupTransport
    ) -> Rollout | Failure:
        function = self._functions[start.domain]
        started, began = time.monotonic(), time.time_ns()
        trace = f"{start.group_id}/{attempt}"
        try:
            async with asyncio.timeout(None) as deadline:
                llm.state.hint = self._hint(start)
                with RolloutLimit(deadline, self._rules.timeout_s, partial(transport.answer_of, llm.state.name)):
                    result = await function(self._cfg, llm, start.problem, self._session)
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

    def _hint(self, start: StartGroup) -> str | None:
        if start.evaluation or start.domain not in self._rules.hinted:
            return None
        hint = start.problem.get("hint")
        if not isinstance(hint, str):
            raise DomainError(
                f"`teachers.hint` is true, but the problem has no text `hint`: its keys are {[*start.problem]}"
            )
        return hint

    def _llm(self, start: StartGroup, attempt: int, transport: Transport, server_url: str) -> TrainableLLM:
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
            num_forks=llm.state.num_forks,
            num_compacted=llm.state.num_compacted,
            fallback_version=start.version,
            seq_length=self._rules.seq_length,
            rewards=self._rules.rewards,
        )
        if not start.evaluation:
            check_named_rewards(rollout.metrics, rollout.rewards, self._rules.named_rewards)
        if not rollout.sequences and not start.evaluation:
            detail = (
                f"{function_name(self._functions[start.domain])} returned {len(result.training_texts)} training texts "
                f"without a sampled token to train on: labels of {MASKED_TOKEN_ID} mask tokens"
            )
            return Failure(attempt=attempt, reason=DropReason.NO_TRAINED_TOKENS, detail=detail, latency_s=latency_s)
        return rollout


def function_name(function: Callable) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


class GroupTasks:
    """The running groups of a worker, by task id. An error outside a domain's function ends ``tasks``."""

    def __init__(self, executor: Executor, send: Callable[[FromWorker], Awaitable[None]], tasks: asyncio.TaskGroup):
        self._executor, self._send, self._tasks = executor, send, tasks
        self._groups: dict[int, asyncio.Task] = {}

    def start(self, start: StartGroup) -> None:
        self._groups[start.task_id] = self._tasks.create_task(self._run(start))

    def cancel(self, task_id: int) -> None:
        group = self._groups.pop(task_id, None)
        if group is not None:
            group.cancel()

    def close(self) -> None:
        for task_id in list(self._groups):
            self.cancel(task_id)

    async def _run(self, start: StartGroup) -> None:
        task_id = start.task_id

        async def report(outcome: Rollout | Failure) -> None:
            if isinstance(outcome, Rollout):
                await self._send(RolloutDone(task_id=task_id, rollout=outcome))
            else:
                await self._send(RolloutFailed(task_id=task_id, failure=outcome))

        aborted_requests = await self._executor.stream_group(start, report)
        await self._send(GroupEnded(task_id=task_id, aborted_requests=aborted_requests))
        self._groups.pop(task_id, None)
