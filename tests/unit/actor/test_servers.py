"""Which server a group gets."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from pipelinerl.actor import servers
from pipelinerl.actor.router import Client, GroupRoute, RequestLimits
from pipelinerl.actor.servers import InferenceServer, ServerLoads

URLS = {"fast": "http://fast", "slow": "http://slow"}


async def test_group_waits_for_a_server_with_its_version_and_older_ones_keep_their_requests() -> None:
    pool = ServerLoads()
    pool.update(URLS, {"fast": 3, "slow": 2})
    slow = await pool.choose(0)
    while slow.name != "slow":
        slow = await pool.choose(0)
    assert {(await pool.choose(3)).name for _ in range(20)} == {"fast"}
    waiting = asyncio.create_task(pool.choose(4))
    request = asyncio.create_task(asyncio.sleep(60))
    slow.requests.add(request)
    pool.update(URLS, {"fast": 4, "slow": 2})
    assert (await waiting).name == "fast"
    assert slow.in_service
    assert not request.cancelled()
    request.cancel()


async def test_next_group_goes_where_attempts_have_ended_and_a_group_moves_with_those_that_have_not() -> None:
    """Groups of 4, 4 and 4 attempts: loads 4|4, then 1|4 after three ends, then 5|4, then 9 when a server leaves."""
    pool, client = ServerLoads(), Client(None, RequestLimits(timeout_s=1, max_retries=0, max_completions=4))
    pool.update(URLS, {"fast": 0, "slow": 0})
    first, second, third = (GroupRoute(pool, client, 4, 0) for _ in range(3))
    one, other = await first.choose_server(), await second.choose_server()
    assert (one.load, other.load) == (4, 4)
    for _ in range(3):
        first.end_attempt()
    assert (one.load, other.load) == (1, 4)
    assert await third.choose_server() is one
    assert (one.load, other.load) == (5, 4)
    pool.update({other.name: other.url}, {other.name: 0})
    assert await first.choose_server() is other
    assert await third.choose_server() is other
    assert (one.load, other.load) == (0, 9)
    first.end_attempt()
    first.leave()
    assert other.load == 8


async def test_groups_are_shared_by_what_servers_take() -> None:
    pool = ServerLoads()
    pool.update(URLS, {"fast": 0, "slow": 0}, capacities={"fast": 30, "slow": 10})
    for _ in range(40):
        (await pool.choose(0)).load += 1
    assert {server.name: server.load for server in (await chosen(pool))} == {"fast": 30, "slow": 10}


async def test_server_that_failed_is_avoided_for_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(servers, "time", SimpleNamespace(monotonic=lambda: now))
    pool = ServerLoads()
    pool.update(URLS, {"fast": 0, "slow": 0})
    failed = await pool.choose(0)
    failed.cool_down()
    other = await pool.choose(0)
    other.load = 1
    now = 1.9
    assert await pool.choose(0) is other
    now = 2.1
    assert await pool.choose(0) is failed


async def test_capacities_that_are_not_known_of_all_do_not_count() -> None:
    pool = ServerLoads()
    pool.update(URLS, {"fast": 0, "slow": 0}, capacities={"fast": 30})
    for _ in range(40):
        (await pool.choose(0)).load += 1
    assert [server.load for server in (await chosen(pool))] == [20, 20]


async def test_server_that_missed_its_probe_loses_its_requests_and_comes_back_as_another_one() -> None:
    pool = ServerLoads()
    pool.update({"fast": "http://fast"}, {"fast": 3})
    before = await pool.choose(0)
    request = asyncio.create_task(asyncio.sleep(60))
    before.requests.add(request)
    pool.update({"fast": "http://fast"}, {"fast": 3}, {"fast": 1})
    after = await pool.choose(0)
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert request.cancelled()
    assert (before.in_service, before.probes_missed, after.in_service, after.probes_missed) == (False, 0, True, 1)
    pool.update({"fast": "http://fast"}, {"fast": 4}, {"fast": 1})
    assert await pool.choose(0) is after


async def chosen(pool: ServerLoads) -> list[InferenceServer]:
    """Both servers: each in turn is the one without a recent failure."""
    first = await pool.choose(0)
    first.cool_down()
    return [first, await pool.choose(0)]
