"""Which server a group gets."""

import asyncio
import contextlib

from pipelinerl.actor.servers import InferenceServer, ServerPool

URLS = {"fast": "http://fast", "slow": "http://slow"}


async def test_group_waits_for_a_server_with_its_version_and_older_ones_keep_their_requests() -> None:
    pool = ServerPool()
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


async def test_groups_are_shared_by_what_servers_take() -> None:
    pool = ServerPool()
    pool.update(URLS, {"fast": 0, "slow": 0}, capacities={"fast": 30, "slow": 10})
    for _ in range(40):
        (await pool.choose(0)).load += 1
    assert {server.name: server.load for server in (await chosen(pool))} == {"fast": 30, "slow": 10}


async def test_capacities_that_are_not_known_of_all_do_not_count() -> None:
    pool = ServerPool()
    pool.update(URLS, {"fast": 0, "slow": 0}, capacities={"fast": 30})
    for _ in range(40):
        (await pool.choose(0)).load += 1
    assert [server.load for server in (await chosen(pool))] == [20, 20]


async def test_server_that_missed_its_probe_loses_its_requests_and_comes_back_as_another_one() -> None:
    pool = ServerPool()
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


async def chosen(pool: ServerPool) -> list[InferenceServer]:
    """Both servers: each in turn is the one without a recent failure."""
    first = await pool.choose(0)
    first.cool_down()
    return [first, await pool.choose(0)]
