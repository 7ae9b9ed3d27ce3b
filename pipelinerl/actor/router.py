"""Carries a group's requests to one server, joins equal requests, and repeats failed ones on another server."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
import msgspec
import numpy as np

from pipelinerl.actor.growth import Followed, Growth
from pipelinerl.actor.servers import InferenceServer, ServerLoads
from pipelinerl.async_llm import backoff_s, is_retryable, post_generate
from pipelinerl.config.rules.rollouts import distortions
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.llm import GenerateRequest, TrainableLLM
from pipelinerl.observability import spans
from pipelinerl.rollouts import CallTokens

log = logging.getLogger(__name__)

COALESCE_WINDOW_S = 0.002
"""How long a request waits for equal ones of its group. It is sent at once when all attempts have joined."""
FIRST_BACKOFF_S = 0.25
"""Wait before the first repetition of a request. It doubles from one to the next."""
MIN_EVENNESS = 0.8
"""Requests are joined only while a prompt's mean completion length is at least this fraction of the longest."""
EVENNESS_WEIGHT = 0.05
"""Weight of a prompt in the moving average: the newest 20 prompts or so decide whether requests are joined."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on requests, from the configuration and the system."""

    timeout_s: float
    max_retries: int
    max_completions: int
    """Completions per request."""
    max_connections: int = 768
    """Connections that the worker may have open at once, for the policy's requests and the domains' own."""

    @property
    def max_requests(self) -> int:
        """Concurrent requests to the policy. A quarter of the connections is left for verifiers and tools."""
        return max(1, self.max_connections - self.max_connections // 4)


class Client:
    """Sends requests to servers, at most ``limits.max_requests`` at once. One per worker.

    Args:
        session: the worker's connections, directly to the servers. Domains may get it too, so it carries no secret.
        token: bearer token of the servers.
        only_version: the version of all tokens in a run without a trainer. None: as the servers report it.
    """

    def __init__(
        self, session: aiohttp.ClientSession, limits: RequestLimits, token: str = "", only_version: int | None = None
    ):
        self.session, self.limits, self._token = session, limits, token
        self._only_version = only_version
        self._places = asyncio.Semaphore(limits.max_requests)
        self.followed = Followed()

    async def follow(self) -> None:
        """Asks the servers once how far the answers are that have been under way for a while."""
        await self.followed.ask(self.session, self._token)

    async def post(
        self, server: InferenceServer, request: GenerateRequest, n: int, growth: Growth | None = None
    ) -> list[CallTokens]:
        """Requests ``n`` completions and tells ``growth`` how they grow.

        Raises:
            TransportError: the server does not deliver them for any reason.
        """
        async with self._places:
            if not server.in_service:
                raise TransportError(f"{server.name} left service")
            growth = growth or Growth()
            name, lengths = self.followed.begin(server, growth), list[int]()
            task = asyncio.get_running_loop().create_task(
                post_generate(self.session, server.url, request, n=n, token=self._token, name=name)
            )
            server.requests.add(task)
            try:
                completions = await self._answered(task, growth, server)
                lengths += [len(tokens.completion_ids) for tokens in completions]
                if self._only_version is not None:
                    return [_of_version(tokens, self._only_version) for tokens in completions]
                # a restarted server samples from the weights on disk until the trainer has sent it the current ones
                if any(len(tokens.completion_ids) and not len(tokens.version_spans) for tokens in completions):
                    raise TransportError(f"{server.name} restarted and holds no weights of this run yet")
                return completions
            except asyncio.CancelledError:
                if server.in_service or is_cancelled():
                    raise
                raise TransportError(f"{server.name} left service") from None
            finally:
                task.cancel()
                server.requests.discard(task)
                self.followed.end(name, lengths)

    async def _answered(
        self, task: asyncio.Task[list[CallTokens]], growth: Growth, server: InferenceServer
    ) -> list[CallTokens]:
        """Returns the answer. Raises ``TransportError`` if it has not grown within the time limit."""
        while not task.done():
            left_s = growth.moved + self.limits.timeout_s - time.monotonic()
            if left_s <= 0:
                raise TransportError(
                    f"{server.name} gave no completion within actor.request_timeout_s={self.limits.timeout_s}, "
                    f"and its answer of {growth.tokens} tokens has not grown in that time"
                )
            await asyncio.wait((task,), timeout=left_s)
        return task.result()


def _of_version(tokens: CallTokens, version: int) -> CallTokens:
    count = len(tokens.completion_ids)
    spans = np.array([(0, count, version)] if count else [], dtype=np.int32).reshape(-1, 3)
    return replace(tokens, version_spans=spans)


def is_cancelled() -> bool:
    """Whether the current task itself was cancelled, and not only a task that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class GroupRoute:
    """Keeps a group on one server, and moves it to another when that server fails or leaves service."""

    def __init__(self, pool: ServerLoads, client: Client, attempts: int, oldest: int):
        """
        Args:
            attempts: size of the group. Those that have not ended are counted as load of its server.
            oldest: weight version. A server with an older one is not chosen.
        """
        self._pool, self._client, self._attempts, self._oldest = pool, client, attempts, oldest
        self.server: InferenceServer | None = None
        self.aborted_requests = 0
        """Requests that ended without a completion, repeated or not."""
        self._answered: set[tuple[str, int]] = set()
        """Name of a server, and the weight probes that it had missed when it answered."""

    @property
    def used(self) -> dict[str, int]:
        """The servers that answered, by name → weight probes that each had missed when it first did."""
        return dict(sorted(self._answered, key=lambda answered: (answered[0], -answered[1])))

    def add_used(self, servers: Mapping[str, int]) -> None:
        """Adds servers that answered the group before a crash, in the form of ``used``."""
        self._answered.update(servers.items())

    async def choose_server(self) -> InferenceServer:
        """Returns the group's server. Chooses a new one if there is none or it accepts no more requests."""
        if self.server is None or not self.server.takes_requests:
            self.leave()
            server = await self._pool.choose(self._oldest)
            if self.server is None:  # no other attempt of the group has chosen meanwhile
                self.server = server
                server.assign(self._attempts)
        return self.server

    def end_attempt(self) -> None:
        """Removes an attempt that has ended from the group's load."""
        self._attempts -= 1
        if self.server is not None:
            self.server.release(1)

    def leave(self) -> None:
        """Removes the group and its load from its server."""
        if self.server is not None:
            self.server.release(self._attempts)
            self.server = None

    async def request(self, request: GenerateRequest, n: int, growth: Growth | None = None) -> list[CallTokens]:
        """Requests ``n`` completions, repeating until success, a refusal, or the end of the retries.

        Waiting for a server, or losing one that leaves service, costs no retry.
        """
        repetition = 0
        while True:
            server = await self.choose_server()
            try:
                completions = await self._client.post(server, request, n, growth)
                self._answered.add((server.name, server.probes_missed))
                return completions
            except TransportError as error:
                self.aborted_requests += 1
                if server.in_service:
                    if repetition >= self._client.limits.max_retries or not is_retryable(error):
                        raise
                    server.cool_down()
                    log.warning(
                        "event=request_repeated server=%s repetition=%d error=%s", server.name, repetition + 1, error
                    )
                    await asyncio.sleep(backoff_s(repetition, FIRST_BACKOFF_S))
                    repetition += 1
                if self.server is server:
                    self.leave()


class JoinPolicy:
    """Joins equal requests of a group only while the completions of a prompt have about equal lengths.

    A joined request costs the server half the CPU, but the places of its shorter completions stay empty to its end.
    """

    def __init__(self) -> None:
        self._evenness = 1.0

    @property
    def joins(self) -> bool:
        return self._evenness >= MIN_EVENNESS

    def observe(self, lengths: Sequence[int]) -> None:
        """Takes the lengths of the completions of one prompt, in tokens."""
        if len(lengths) > 1 and max(lengths) > 0:
            evenness = sum(lengths) / (len(lengths) * max(lengths))
            self._evenness += EVENNESS_WEIGHT * (evenness - self._evenness)


@dataclass(eq=False)
class _Bucket:
    """Equal requests that wait to be sent together."""

    request: GenerateRequest
    waiters: list[asyncio.Future[CallTokens]] = field(default_factory=list)
    growth: Growth = field(default_factory=Growth)
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    """Sends them and waits for the answer. None: not sent yet."""

    @property
    def is_awaited(self) -> bool:
        """Whether a rollout still waits. One that gave up, or whose time is over, does not."""
        return not all(waiter.done() for waiter in self.waiters)

    def end(self) -> None:
        """Cancels those who still wait: tasks that a domain left behind when its rollout ended."""
        for waiter in self.waiters:
            waiter.cancel()


class GroupTransport:
    """Carries the requests of one group and joins equal ones (see ``llm.Transport``).

    Args:
        join_limit: maximum number of requests that are joined into one.
        trained_temperature: temperature at which the trainer will use the samples. None: they are not trained.
    """

    def __init__(
        self, route: GroupRoute, policy: JoinPolicy, join_limit: int, trained_temperature: float | None = None
    ):
        self._route, self._policy, self._join_limit = route, policy, join_limit
        self._trained_temperature = trained_temperature
        self._is_closed = False
        self._checked = b""
        self._lengths: dict[tuple[bytes, bytes], list[int]] = {}
        self._buckets: dict[tuple[bytes, bytes], _Bucket] = {}
        self._sending: set[asyncio.Task] = set()
        self._awaited: dict[str, list[Growth]] = defaultdict(list)
        """Name of a rollout → the answers that it waits for."""

    def answer_of(self, rollout: str) -> Growth | None:
        """The answer that a rollout waits for, the one that it asked for first. None if it waits for none."""
        return next(iter(self._awaited.get(rollout, ())), None)

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        """Samples one completion (see ``llm.Transport``). Cancels a task that a rollout of an ended group has left."""
        if self._is_closed:
            raise asyncio.CancelledError("this llm is of a rollout whose group has ended")
        self._refuse_distortion(request.body_key)
        began = time.time_ns()
        loop = asyncio.get_running_loop()
        key = request.key
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(request)
            bucket.timer = loop.call_later(COALESCE_WINDOW_S, self._send, key)
        waiter: asyncio.Future[CallTokens] = loop.create_future()
        bucket.waiters.append(waiter)
        separate = not self._policy.joins or b'"seed"' in request.body_key
        if separate or len(bucket.waiters) >= self._join_limit:
            self._send(key)
        awaited = self._awaited[llm.state.name]
        awaited.append(bucket.growth)
        try:
            tokens = await waiter
        finally:
            awaited.remove(bucket.growth)
            if bucket.task is not None and not bucket.is_awaited:
                bucket.task.cancel()  # without effect on one that has answered
        spans.record("llm call", llm.state.name, began, tokens=len(tokens.completion_ids))
        self._lengths.setdefault(key, []).append(len(tokens.completion_ids))
        return tokens

    def _refuse_distortion(self, body_key: bytes) -> None:
        """Raises ``DomainError`` if a domain changed more than lengths and stop strings of samples that are trained."""
        if self._trained_temperature is None or body_key == self._checked:
            return
        parameters = msgspec.json.decode(body_key)
        wrong = distortions(parameters)
        if parameters.get("temperature", 1.0) != self._trained_temperature:
            wrong.append("temperature")
        if wrong:
            raise DomainError(
                f"the rollout function sets llm.parameters[{wrong[0]!r}]={parameters.get(wrong[0])!r}, but the trainer "
                f"computes the whole distribution at temperature {self._trained_temperature}: leave it as it is"
            )
        self._checked = body_key

    def close(self) -> None:
        """Cancels unanswered requests and reports the group's completion lengths to the policy."""
        self._is_closed = True
        for lengths in self._lengths.values():
            self._policy.observe(lengths)
        for bucket in self._buckets.values():
            if bucket.timer:
                bucket.timer.cancel()
            bucket.end()
        for task in self._sending:
            task.cancel()
        self._route.leave()

    def _send(self, key: tuple[bytes, bytes]) -> None:
        bucket = self._buckets.pop(key, None)
        if bucket is None:
            return
        if bucket.timer:
            bucket.timer.cancel()
        if not bucket.is_awaited:
            return
        bucket.waiters = [waiter for waiter in bucket.waiters if not waiter.done()]
        bucket.task = asyncio.get_running_loop().create_task(self._deliver(bucket))
        self._sending.add(bucket.task)
        bucket.task.add_done_callback(self._sending.discard)
        bucket.task.add_done_callback(lambda _: bucket.end())

    async def _deliver(self, bucket: _Bucket) -> None:
        try:
            completions = await self._route.request(bucket.request, len(bucket.waiters), bucket.growth)
        except Exception as error:  # noqa: BLE001 — passed on to every waiter
            for waiter in bucket.waiters:
                if not waiter.done():
                    waiter.set_exception(error)
            return
        for waiter, tokens in zip(bucket.waiters, completions, strict=True):
            if not waiter.done():
                waiter.set_result(tokens)
