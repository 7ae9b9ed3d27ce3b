"""Runs rollouts in a worker: attempts of a group side by side, each request on a server in service.

Consumes ``StartGroup``; produces each attempt's rollout or failure as it ends, then ``GroupEnded``. An attempt has
a deadline, a request has one too; what fails in transport is repeated on the least loaded server, and a failure is
typed and never becomes a reward, even if the domain swallows it. Requests of a group that ask the same thing at the
same time travel as one request with ``n`` completions.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.actor import failures
from pipelinerl.actor.messages import (
    Failure,
    FromWorker,
    GroupEnded,
    GroupFinished,
    RolloutDone,
    RolloutFailed,
    StartGroup,
)
from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import backoff_s, is_retryable, post_generate
from pipelinerl.config.rules import distortions
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.llm import GenerateRequest, TrainableLLM
from pipelinerl.records import Rollout
from pipelinerl.rollouts import CallTokens, RewardMode, RolloutResult

log = logging.getLogger(__name__)

COALESCE_WINDOW_S = 0.002
"""How long a request waits for equal ones of its group; it goes at once when all attempts have joined."""
FIRST_BACKOFF_S = 0.25
MIN_EVENNESS = 0.8
"""Mean over longest completion of a prompt, below which requests are not joined."""
EVENNESS_WEIGHT = 0.05
COOL_DOWN_S = 2.0
"""A server that failed is chosen only after all others for this long."""

RolloutFunction = Callable[[DictConfig, TrainableLLM, dict, aiohttp.ClientSession], Awaitable[RolloutResult]]
Report = Callable[[Rollout | Failure], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the scheduler takes from the configuration."""

    rollout_timeout_s: float
    request_timeout_s: float
    max_request_retries: int
    max_completions_per_request: int
    seq_length: int
    rewards: RewardMode = "rollout"
    api_token: str = ""
    max_connections: int = 768
    """Connections that the worker may have open at once, of the policy's requests and the domains' own."""

    @property
    def max_requests(self) -> int:
        """Requests to the policy at once: a quarter of the connections is left to verifiers and tools."""
        return max(1, self.max_connections - self.max_connections // 4)


@dataclass(eq=False)
class Server:
    """A server as this worker sees it."""

    name: str
    url: str
    load: int = 0
    """Rollouts of the groups that use it."""
    cool_until: float = 0.0
    in_service: bool = True
    requests: set[asyncio.Task] = field(default_factory=set)


class ServerPool:
    """The servers in service. Knows load and recent failures; never talks to them."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}
        self._changed = asyncio.Event()

    def update(self, urls: dict[str, str]) -> None:
        """Takes the servers now in service; requests on a server that left are cancelled, to be repeated elsewhere."""
        for name in [name for name, server in self._servers.items() if urls.get(name) != server.url]:
            server = self._servers.pop(name)
            server.in_service = False
            for request in server.requests:
                request.cancel()
        for name, url in urls.items():
            if name not in self._servers:
                self._servers[name] = Server(name, url)
        self._changed.set()

    async def choose(self) -> Server:
        """The least loaded server that did not fail just now; waits while none is in service."""
        while not self._servers:
            self._changed.clear()
            await self._changed.wait()
        now = time.monotonic()
        return min(self._servers.values(), key=lambda server: (server.cool_until > now, server.load, random.random()))


class JoinPolicy:
    """Whether equal requests of a group travel as one.

    One request for all costs the server half the CPU, but answers when its longest completion does: places of the
    shorter ones stay empty. So requests are joined while completions of a prompt have about equal lengths.
    """

    def __init__(self) -> None:
        self._evenness = 1.0

    @property
    def joins(self) -> bool:
        return self._evenness >= MIN_EVENNESS

    def observe(self, lengths: Sequence[int]) -> None:
        """Lengths of the completions of one prompt, in tokens."""
        if len(lengths) > 1 and max(lengths) > 0:
            evenness = sum(lengths) / (len(lengths) * max(lengths))
            self._evenness += EVENNESS_WEIGHT * (evenness - self._evenness)


@dataclass(eq=False)
class _Bucket:
    """Equal requests that wait to leave together."""

    request: GenerateRequest
    waiters: list[asyncio.Future[CallTokens]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class GroupTransport:
    """Carries the requests of one group: joined when equal, on one server, repeated elsewhere when that fails."""

    def __init__(
        self,
        pool: ServerPool,
        session: aiohttp.ClientSession,
        settings: Settings,
        attempts: int,
        policy: JoinPolicy,
        places: asyncio.Semaphore,
        trained_temperature: float | None = None,
    ):
        """``places`` are for requests at once, of all groups together.

        ``trained_temperature``: what is sampled will be trained at this one; None = it will not be trained.
        """
        self._pool = pool
        self._trained_temperature = trained_temperature
        self._checked = b""
        self._policy = policy
        self._places = places
        self._lengths: dict[tuple[bytes, bytes], list[int]] = {}
        self._session = session
        self._settings = settings
        self._attempts = attempts
        self._join_limit = min(attempts, settings.max_completions_per_request)
        self._buckets: dict[tuple[bytes, bytes], _Bucket] = {}
        self._sending: set[asyncio.Task] = set()
        self.server: Server | None = None
        self.aborted_requests = 0

    async def settle(self) -> Server:
        """The group's server; a new one when there is none or it left service."""
        if self.server is None or not self.server.in_service:
            self._leave()
            server = await self._pool.choose()
            if self.server is None:  # nobody else of the group chose in the meantime
                self.server = server
                server.load += self._attempts
        return self.server

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        """One completion; see ``async_llm.Transport``."""
        self._refuse_distortion(request.body_key)
        loop = asyncio.get_running_loop()
        key = request.key
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(request)
            bucket.timer = loop.call_later(COALESCE_WINDOW_S, self._send, key)
        waiter: asyncio.Future[CallTokens] = loop.create_future()
        bucket.waiters.append(waiter)
        alone = not self._policy.joins or b'"seed"' in request.body_key
        if alone or len(bucket.waiters) >= self._join_limit:
            self._send(key)
        tokens = await waiter
        self._lengths.setdefault(key, []).append(len(tokens.completion_ids))
        return tokens

    def _refuse_distortion(self, body_key: bytes) -> None:
        """A domain may choose lengths and stop strings, but what is trained comes from the run's distribution."""
        if self._trained_temperature is None or body_key == self._checked:
            return
        parameters = msgspec.json.decode(body_key)
        wrong = distortions(parameters)
        if parameters.get("temperature", 1.0) != self._trained_temperature:
            wrong.append("temperature")
        if wrong:
            raise DomainError(
                f"the rollout function sets llm.parameters[{wrong[0]!r}]={parameters.get(wrong[0])!r}, but the trainer "
                f"knows the whole distribution at temperature {self._trained_temperature} only: leave it as it is"
            )
        self._checked = body_key

    def close(self) -> None:
        """Gives up what is still under way; tells the policy what the group taught."""
        for lengths in self._lengths.values():
            self._policy.observe(lengths)
        for bucket in self._buckets.values():
            if bucket.timer:
                bucket.timer.cancel()
        for task in self._sending:
            task.cancel()
        self._leave()

    def _leave(self) -> None:
        if self.server is not None:
            self.server.load -= self._attempts
            self.server = None

    def _send(self, key: tuple[bytes, bytes]) -> None:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            return
        if bucket.timer:
            bucket.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._deliver(bucket))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _deliver(self, bucket: _Bucket) -> None:
        try:
            completions = await self._request(bucket.request, len(bucket.waiters))
        except Exception as error:  # handed to those who wait for the answer
            for waiter in bucket.waiters:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        for waiter, tokens in zip(bucket.waiters, completions, strict=True):
            if not waiter.done():
                waiter.set_result(tokens)

    async def _request(self, request: GenerateRequest, n: int) -> list[CallTokens]:
        """Repeats until an answer, a refusal, or the end of the retries. Waiting for a server costs no retry."""
        repetition = 0
        while True:
            try:
                async with self._places:
                    server = await self.settle()
                    return await self._post(server, request, n)
            except TransportError as error:
                self.aborted_requests += 1
                if server.in_service:
                    if repetition >= self._settings.max_request_retries or not is_retryable(error):
                        raise
                    server.cool_until = time.monotonic() + COOL_DOWN_S
                    log.warning("request repeated server=%s repetition=%d error=%s", server.name, repetition + 1, error)
                    await asyncio.sleep(backoff_s(repetition, FIRST_BACKOFF_S))
                    repetition += 1
                if self.server is server:
                    self._leave()

    async def _post(self, server: Server, request: GenerateRequest, n: int) -> list[CallTokens]:
        task = asyncio.get_running_loop().create_task(
            post_generate(self._session, server.url, request, n=n, token=self._settings.api_token)
        )
        server.requests.add(task)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return _with_known_weights(await task, server)
        except TimeoutError as error:
            raise TransportError(
                f"{server.name} gave no completion within actor.request_timeout_s={self._settings.request_timeout_s}"
            ) from error
        except asyncio.CancelledError:
            if server.in_service or _is_cancelled():
                raise
            raise TransportError(f"{server.name} left service") from None
        finally:
            task.cancel()
            server.requests.discard(task)


class Scheduler:
    """Runs groups with the domains' functions."""

    def __init__(
        self,
        cfg: DictConfig,
        functions: list[RolloutFunction],
        llms: tuple[TrainableLLM, TrainableLLM],
        session: aiohttp.ClientSession,
        settings: Settings,
    ):
        self._cfg = cfg
        self._functions = functions
        self._train_llm, self._eval_llm = llms
        self._session = session
        self._settings = settings
        self._policy = JoinPolicy()
        self._places = asyncio.Semaphore(settings.max_requests)
        self.pool = ServerPool()

    async def run_group(self, start: StartGroup) -> GroupFinished:
        """Every attempt at the problem, side by side; ends when all have ended."""
        outcomes: list[Rollout | Failure] = []

        async def collect(outcome: Rollout | Failure) -> None:
            outcomes.append(outcome)

        aborted_requests = await self.stream_group(start, collect)
        rollouts = (outcome for outcome in outcomes if isinstance(outcome, Rollout))
        return GroupFinished(
            ticket=start.ticket,
            rollouts=tuple(sorted(rollouts, key=lambda rollout: rollout.attempt)),
            failures=tuple(outcome for outcome in outcomes if isinstance(outcome, Failure)),
            aborted_requests=aborted_requests,
        )

    async def stream_group(self, start: StartGroup, report: Report) -> int:
        """Reports every attempt as it ends; returns how many requests ended without a completion.

        An attempt lasts until its report is taken: who reads slowly slows down the rollouts and fills no memory.
        """
        temperature = None if start.evaluation else self._train_llm.parameters.get("temperature", 1.0)
        transport = GroupTransport(
            *(self.pool, self._session, self._settings, len(start.attempts)),
            *(self._policy, self._places, temperature),
        )

        async def run(attempt: int) -> None:
            await report(await self._run_attempt(start, attempt, transport))

        try:
            await transport.settle()
            async with asyncio.TaskGroup() as group:
                for attempt in start.attempts:
                    group.create_task(run(attempt))
        finally:
            transport.close()
        return transport.aborted_requests

    async def _run_attempt(self, start: StartGroup, attempt: int, transport: GroupTransport) -> Rollout | Failure:
        llm = self._llm(start.evaluation, transport)
        function = self._functions[start.domain]
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.rollout_timeout_s) as deadline:
                result = await function(self._cfg, llm, start.problem, self._session)
            if llm._failure is not None:
                raise llm._failure
            return self._checked(result, start, attempt, llm, time.monotonic() - started)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # a domain's code may raise anything
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            cause = llm._failure or error
            if deadline.expired():
                cause = TimeoutError(f"no result within actor.rollout_timeout_s={self._settings.rollout_timeout_s}")
            reason = failures.classify(cause)
            detail = failures.describe(cause, function_name(function), start.problem)
            return Failure(attempt=attempt, reason=reason, detail=detail, latency_s=time.monotonic() - started)

    def _llm(self, evaluation: bool, transport: GroupTransport) -> TrainableLLM:
        template = self._eval_llm if evaluation else self._train_llm
        llm = template.model_copy()
        llm.base_url = transport.server.url if transport.server else ""
        llm.parameters = dict(template.parameters)
        llm._transport = transport
        llm._turns = []
        llm._num_calls = 0
        llm._failure = None
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
            num_llm_calls=llm._num_calls,
            fallback_version=start.version,
            seq_length=self._settings.seq_length,
            rewards=self._settings.rewards,
        )
        if not rollout.sequences and not start.evaluation:
            detail = f"{function_name(self._functions[start.domain])} returned no sampled token to train on"
            return Failure(attempt=attempt, reason=failures.EMPTY, detail=detail, latency_s=latency_s)
        return rollout


def _with_known_weights(completions: list[CallTokens], server: Server) -> list[CallTokens]:
    """A server that restarted samples from the weights on disk until the trainer has sent it the current ones."""
    if any(len(tokens.completion_ids) and not len(tokens.version_spans) for tokens in completions):
        raise TransportError(f"{server.name} restarted and holds no weights of this run yet")
    return completions


def _is_cancelled() -> bool:
    """Whether the running task itself was asked to stop (and not only something that it waited for)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def function_name(function: Callable) -> str:
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


class WorkSet:
    """The groups under way in a worker, by ticket. What goes wrong outside a domain's function ends ``tasks``."""

    def __init__(self, scheduler: Scheduler, send: Callable[[FromWorker], Awaitable[None]], tasks: asyncio.TaskGroup):
        self._scheduler, self._send, self._tasks = scheduler, send, tasks
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

        aborted_requests = await self._scheduler.stream_group(start, report)
        await self._send(GroupEnded(ticket=ticket, aborted_requests=aborted_requests))
        self._groups.pop(ticket, None)
