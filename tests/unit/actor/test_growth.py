"""Answers under way: what a worker knows of them, and the time limits that wait while they grow."""

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pipelinerl.actor import router
from pipelinerl.actor.executor import RolloutLimit
from pipelinerl.actor.growth import GROWING_S, Followed, Growth
from pipelinerl.actor.messages import Sampling
from pipelinerl.actor.metrics import ActorMetrics
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.actor.servers import InferenceServer
from pipelinerl.errors import TransportError
from pipelinerl.records.answers import RequestUnderWay, UnderWay
from tests.says import says

SERVER = InferenceServer("actor_llm_0", "http://nowhere")


def under_way(sampled: int, **requests: tuple[tuple[int, ...], bool]) -> UnderWay:
    return UnderWay(
        sampled=sampled,
        requests={name: RequestUnderWay(tokens=tokens, waits=waits) for name, (tokens, waits) in requests.items()},
    )


class Two:
    """Two requests on one server."""

    def __init__(self) -> None:
        self.followed = Followed()
        self.growths = Growth(), Growth()
        self.names = [self.followed.begin(SERVER, growth) for growth in self.growths]
        for growth in self.growths:
            growth.moved = 0.0

    def report(self, now: float, sampled: int, *requests: tuple[tuple[int, ...], bool]) -> list[float]:
        """What the server says now, and when each request then has moved."""
        self.followed.add_report(SERVER, under_way(sampled, **dict(zip(self.names, requests, strict=True))), now)
        return [growth.moved for growth in self.growths]


def test_growth_counts_tokens_under_way_once_and_knows_the_longest() -> None:
    two = Two()
    two.report(1.0, 30, ((10, 12), False), ((8,), False))
    assert (two.followed.tokens, two.followed.longest) == (30, 12)
    two.report(2.0, 63, ((25, 20), False), ((18,), False))
    assert (two.followed.tokens, two.followed.longest) == (63, 25)
    two.followed.end(two.names[0], [26, 31])
    assert (two.followed.tokens, two.followed.longest) == (63 + 57 - 45, 18)
    two.followed.end(two.names[1])
    assert (two.followed.tokens, two.followed.longest) == (75, 0), "sampled in vain, and sampled all the same"


def test_growth_moves_with_its_own_tokens_and_with_the_end_of_one_of_its_answers() -> None:
    two = Two()
    assert two.report(1.0, 9, ((5,), False), ((4, 4), False)) == [1.0, 1.0]
    assert two.report(2.0, 19, ((5,), False), ((4, 9), False)) == [1.0, 2.0]
    assert two.report(3.0, 29, ((5,), False), ((9,), False)) == [1.0, 3.0]
    assert two.followed.tokens == 5 + 13


def test_growth_of_a_request_that_waits_for_its_turn_is_its_servers() -> None:
    """Nothing is sampled of it. It is not lost while its server samples others, and lost when nothing moves."""
    two = Two()
    two.report(1.0, 5, ((5,), False), ((0,), True))
    assert two.report(2.0, 9, ((9,), False), ((0,), True)) == [2.0, 2.0]
    assert two.report(3.0, 9, ((9,), False), ((0,), True)) == [2.0, 2.0]


def test_growth_of_requests_that_the_server_does_not_know_stands_still() -> None:
    two = Two()
    two.followed.add_report(SERVER, under_way(500, other=((3,), False)), 1.0)
    two.followed.add_report(InferenceServer("another", "u"), under_way(500, **{two.names[0]: ((3,), False)}), 1.0)
    assert [growth.moved for growth in two.growths] == [0.0, 0.0]
    assert two.followed.tokens == 0


@pytest.mark.parametrize(
    ("status", "body", "asked"),
    [(404, b"", 1), (405, b"", 1)]
    + [(status, b"", 2) for status in (204, 401, 403, 408, 425, 429, 500, 502, 503, 504)]
    + [(200, body, 2) for body in (b"", b"null", b'{"requests":{"\xff":1}}', b"[" * 100_000)],
)
async def test_server_is_asked_again_unless_it_has_no_such_path(status: int, body: bytes, asked: int) -> None:
    served = []

    async def answer(request: web.Request) -> web.Response:
        served.append(request.path)
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        followed = Followed()
        name = followed.begin(InferenceServer("s", str(server.make_url("/"))), Growth())
        followed._requests[name].sent -= 10.0
        for _ in range(2):
            await followed.ask(session, "")
    assert len(served) == asked


def test_growth_of_a_request_that_runs_without_tokens_stands_still_whatever_its_server_samples() -> None:
    two = Two()
    two.report(1.0, 5, ((5,), False), ((0,), False))
    assert two.report(2.0, 9, ((9,), False), ((0,), False)) == [2.0, 0.0]


async def test_request_fails_when_its_answer_has_stood_still_for_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is the test's. Every look at it is one turn of the wait."""
    growth, looks = Growth(moved=0.0), 0

    def clock() -> float:
        nonlocal looks
        looks += 1
        if looks <= 20:
            growth.moved = looks * 0.008  # it grew within the 0.01 s, though it has lasted for twenty times as long
        return looks * 0.01

    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=clock))
    async with aiohttp.ClientSession() as session:
        client = Client(session, RequestLimits(timeout_s=0.05, max_retries=0, max_completions=1))
        task: asyncio.Task[Any] = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(TransportError, match=says("request_timeout_s=0.05", "0 tokens")):
            await client._answered(task, growth, SERVER)
        task.cancel()
    assert looks > 20


class Checks:
    """A rollout's deadline and what it waits for at every look: the last word is repeated."""

    def __init__(self, *answers: Growth | None):
        self.answers, self.looks, self.over = answers, 0, asyncio.Event()

    def answer(self) -> Growth | None:
        self.looks += 1
        return self.answers[min(self.looks, len(self.answers)) - 1]

    def reschedule(self, when: float) -> None:
        self.over.set()

    async def run(self) -> int:
        """Looks until the rollout was ended."""
        with RolloutLimit(self, 0.01, self.answer):  # type: ignore[arg-type]
            await self.over.wait()
        return self.looks


@pytest.fixture
def growing() -> Growth:
    growth = Growth(tokens=5)
    growth.grew = float("inf")
    return growth


async def test_rollout_that_waits_for_no_growing_answer_ends_at_its_limit() -> None:
    assert await Checks(None).run() == 1
    assert await Checks(Growth()).run() == 1, "its server has said nothing"


async def test_rollout_may_wait_for_the_answer_that_grows_at_its_limit_and_for_no_other(growing: Growth) -> None:
    other = Growth()
    other.grew = float("inf")
    assert await Checks(growing, growing, growing, other).run() == 4


async def test_rollout_may_use_its_last_answer_for_as_long_again(growing: Growth) -> None:
    assert await Checks(growing, growing, None).run() > 3
    assert await Checks(growing, None, growing, Growth()).run() == 4


def test_answer_that_has_stood_still_is_not_growing() -> None:
    growth = Growth()
    assert not growth.is_growing(0.0)
    growth.grew = 100.0
    assert growth.is_growing(100.0 + GROWING_S - 1)
    assert not growth.is_growing(100.0 + GROWING_S)


def test_tokens_per_second_count_answers_under_way() -> None:
    metrics = ActorMetrics(0.0)
    metrics.sampling(0, Sampling(tokens=300, longest=40, ended=0))
    metrics.sampling(1, Sampling(tokens=500, longest=70, ended=2))
    first = metrics.snapshot(2.0)
    assert (first["tokens_generated_per_s"], first["longest_under_way"], first["rollouts_ended"]) == (400.0, 70, 2)
    metrics.sampling(1, Sampling(tokens=100, longest=90, ended=1))  # it died, and another has its place
    second = metrics.snapshot(4.0)
    assert (second["tokens_generated_per_s"], second["longest_under_way"], second["rollouts_ended"]) == (50.0, 90, 3)
    assert metrics.snapshot(5.0)["tokens_generated_per_s"] == 0.0


def test_answer_that_grew_within_a_minute_is_growing() -> None:
    growth = Growth(grew=100.0)
    assert [growth.is_growing(100.0 + s) for s in (59.9, 60.1)] == [True, False]
