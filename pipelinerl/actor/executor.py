"""Runs groups in a worker with the domains' functions, all attempts of a group concurrently.

A failure is typed and never becomes a reward, even if the domain's code swallows the exception.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.actor import failures
from pipelinerl.actor.answer_journal import (
    AnswerJournal,
    AttemptFile,
    AttemptTransport,
    RecordedJudgement,
    judgement_key,
)
from pipelinerl.actor.growth import FOLLOW_S, Growth
from pipelinerl.actor.messages import (
    JUDGEMENT,
    Failure,
    FromWorker,
    GroupEnded,
    RolloutDone,
    RolloutFailed,
    StartGroup,
)
from pipelinerl.actor.router import Client, GroupRoute, GroupTransport, JoinPolicy, is_cancelled
from pipelinerl.actor.sequences import to_rollout
from pipelinerl.actor.servers import ServerLoads
from pipelinerl.async_llm import llm_async_generate
from pipelinerl.errors import DomainError
from pipelinerl.llm import RolloutState, TrainableLLM, Transport
from pipelinerl.observability import spans
from pipelinerl.records import Rollout
from pipelinerl.records.drops import DropReason
from pipelinerl.rollouts import MASKED_TOKEN_ID, RewardMode, RolloutResult, check_named_rewards, finite

log = logging.getLogger(__name__)

RolloutFunction = Callable[[DictConfig, TrainableLLM, dict, aiohttp.ClientSession], Awaitable[RolloutResult]]
JudgeFunction = Callable[[DictConfig, dict, list[RolloutResult], aiohttp.ClientSession], Awaitable[Sequence[float]]]
"""A domain's `judge_group`."""
Played = tuple[RolloutResult, Rollout]
TakeOutcome = Callable[[Rollout | Failure], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class RolloutRules:
    """The configuration's settings for a rollout."""

    timeout_s: float
    seq_length: int
    rewards: RewardMode = "rollout"
    named_rewards: tuple[str, ...] = ()
    """Metrics that every training rollout reports, because they are its rewards."""
    max_failed: int = 0
    """Attempts that a group may lose and still be judged and trained."""
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
        judges: `judge_group` of the domains that judge whole groups, by index of the domain.
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
        judges: Mapping[int, JudgeFunction] | None = None,
    ):
        self._cfg = cfg
        self._functions = functions
        self._train_llm, self._eval_llm = llms
        self._client, self._rules, self._answers = client, rules, answers
        self._session, self._judges = session or client.session, judges or {}
        self._policy = JoinPolicy()
        self._domains: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self.servers = ServerLoads()
        self.ended = 0
        """Attempts at training problems that have ended."""

    async def stream_group(self, start: StartGroup, report: TakeOutcome) -> GroupEnded:
        """Reports every attempt as it ends, then judges the group if the domain judges whole groups."""
        route = GroupRoute(self.servers, self._client, len(start.attempts), start.version)
        join_limit = min(len(start.attempts), self._client.limits.max_completions)
        temperature = None if start.evaluation else self._train_llm.parameters.get("temperature", 1.0)
        transport = GroupTransport(route, self._policy, join_limit, temperature)
        files: dict[int, AttemptFile] = {}
        judge = None if start.evaluation else self._judges.get(start.domain)
        played: dict[int, Played] = {}

        async def run(attempt: int, server_url: str) -> None:
            results: list[RolloutResult] = []
            outcome = await self._run_attempt(start, attempt, server_url, route, transport, files.get(attempt), results)
            if judge is not None and isinstance(outcome, Rollout):
                played[attempt] = results[-1], outcome
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
        ended = GroupEnded(task_id=start.task_id, aborted_requests=route.aborted_requests)
        if judge is None:
            return ended
        if not played or len(start.attempts) - len(played) > self._rules.max_failed:
            return msgspec.structs.replace(ended, rewards={})
        judging = asyncio.ensure_future(self._judge(start, judge, [played[attempt] for attempt in sorted(played)]))
        self._domains[judging] = start.domain
        judged = await judging
        if isinstance(judged, Failure):
            return msgspec.structs.replace(ended, rewards={}, failure=judged)
        return msgspec.structs.replace(ended, rewards=judged)

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
        results: list[RolloutResult],
    ) -> Rollout | Failure:
        """Plays an attempt, first with its recorded answers. If its requests differ, it starts anew without them.

        ``results``: gets what the domain's function returns.
        """

        async def play(carrier: Transport, oldest: int) -> Rollout | Failure:
            llm = self._llm(start, attempt, carrier, server_url, file)
            begun = msgspec.structs.replace(start, version=oldest)
            return await self._play(begun, attempt, llm, route, transport, results)

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
        self,
        start: StartGroup,
        attempt: int,
        llm: TrainableLLM,
        route: GroupRoute,
        transport: GroupTransport,
        results: list[RolloutResult],
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
            results.append(result)
            spans.record("rollout", trace, began, root=True, reward=rollout.reward, evaluation=start.evaluation)
            used = route.used
            return msgspec.structs.replace(rollout, servers=tuple(used), probes_missed=tuple(used.values()))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a domain's code may raise anything
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            failure = self._failure(llm.state.failure or error, deadline, function, start, attempt, started)
            spans.record("rollout", trace, began, failed=failure.reason)
            return failure

    async def _judge(self, start: StartGroup, judge: JudgeFunction, played: list[Played]) -> dict[int, float] | Failure:
        """Returns the rewards of the rollouts by attempt, from the journal if they were judged before a crash."""
        rollouts = [rollout for _, rollout in played]
        key, started = judgement_key(rollouts), time.monotonic()
        if self._answers is not None:
            recorded = await self._answers.judgement(start.group_id, key)
            if recorded is not None:
                return recorded
        try:
            async with asyncio.timeout(self._rules.timeout_s) as deadline:
                if any(rollout.rewards != "rollout" for rollout in rollouts):
                    raise DomainError("it gives one reward per rollout, but the texts of its rollouts have their own")
                given = list(await judge(self._cfg, start.problem, [result for result, _ in played], self._session))
            if len(given) != len(rollouts):
                raise DomainError(f"it returned {len(given)} rewards for {len(rollouts)} rollouts: give each its own")
            rewards = {
                rollout.attempt: finite(f"its reward of rollout {i}", reward)
                for i, (rollout, reward) in enumerate(zip(rollouts, given, strict=True))
            }
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a domain's code may raise anything
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return self._failure(error, deadline, judge, start, JUDGEMENT, started)
        if self._answers is not None:
            await self._answers.record_judgement(start.group_id, RecordedJudgement(key, rewards))
        return rewards

    def _failure(
        self,
        cause: BaseException,
        deadline: asyncio.Timeout,
        function: Callable,
        start: StartGroup,
        attempt: int,
        started: float,
    ) -> Failure:
        """Describes why a function of the domain failed. ``started``: monotonic, in seconds."""
        if deadline.expired():
            cause = TimeoutError(f"no result within actor.rollout_timeout_s={self._rules.timeout_s}")
        return Failure(
            attempt=attempt,
            reason=failures.classify(cause),
            detail=failures.describe_failure(cause, function_name(function), start.problem),
            latency_s=time.monotonic() - started,
        )

    def _hint(self, start: StartGroup) -> str | None:
        if start.evaluation or start.domain not in self._rules.hinted:
            return None
        hint = start.problem.get("hint")
        if not isinstance(hint, str):
            raise DomainError(
                f"`teachers.hint` is true, but the problem has no text `hint`: its keys are {[*start.problem]}"
            )
        return hint

    def _llm(
        self, start: StartGroup, attempt: int, transport: Transport, server_url: str, file: AttemptFile | None
    ) -> TrainableLLM:
        template = self._eval_llm if start.evaluation else self._train_llm
        llm = template.model_copy(update={"base_url": server_url, "parameters": dict(template.parameters)})
        llm.bind(
            RolloutState(
                transport,
                turns=[],
                generate=llm_async_generate,
                name=f"{start.group_id}/{attempt}",
                environment_file=None if file is None else file.environment_file,
            )
        )
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

        await self._send(await self._executor.stream_group(start, report))
        self._groups.pop(task_id, None)
