"""Which server a group gets."""

import asyncio

from pipelinerl.actor.servers import ServerPool

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
