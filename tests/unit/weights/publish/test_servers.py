"""What the sender makes of a server that does not answer an update in time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address, ParamSpec, PayloadRange, WeightUpdateRequest
from pipelinerl.weights.publish.delivery import Pushing
from pipelinerl.weights.publish.servers import ServerClient
from pipelinerl.world import Job
from tests.sender_kit import sender_settings

REQUEST = WeightUpdateRequest(
    sender="t",
    version=1,
    params=(ParamSpec("w", "uint8", (4,)),),
    workers=((PayloadRange(start=0, end=4, sources=(Address("trainer", 1),)),),),
    transport="tcp",
    bucket_bytes=64,
    timeout_s=54.0,
    stall_s=5.0,
)


@contextlib.asynccontextmanager
async def client_of(answer: Any) -> AsyncIterator[ServerClient]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
        yield ServerClient(Job(name="a", kind="actor_llm", url="http://server"), http)


GARBAGE = [
    b"",
    b"null",
    b"<html>",
    b"[" * 100_000,
    b'{"\xff":1}',
    b'{"version":1e999}',
    b'{"weight_version":"\xff"}',
    b'{"version":1}',
    b'{"weight_version":7}',
]


@pytest.mark.parametrize("body", GARBAGE, ids=range(len(GARBAGE)))
async def test_answer_that_cannot_be_read_is_a_failed_update_and_no_state(body: bytes) -> None:
    async with client_of(lambda request: httpx.Response(200, content=body)) as client:
        with pytest.raises(WeightUpdateError, match="a answered 200 and no weight update's answer"):
            await client.post(REQUEST, 60.0)
        assert await client.info() is None


async def test_update_that_ends_with_any_error_ends_so_that_the_server_is_sent_the_next_one() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise ZeroDivisionError("a proxy's own")

    ended: list[Any] = []
    pushing = Pushing(cast(Any, None), sender_settings(secret="x"), sender="t", wake=lambda: ended.append("woken"))
    pending: Any = SimpleNamespace(end=lambda name, is_served: ended.append((name, is_served)), update=1)
    async with client_of(answer) as client:
        client.update = asyncio.current_task()
        dispatch: Any = SimpleNamespace(client=client, num_bytes=4, givers=frozenset(), is_chained=True)
        await pushing._update(dispatch, pending, REQUEST, cast(Any, []))
        assert client.update is None
        assert client.last is not None
        assert client.last.error == "a at http://server: ZeroDivisionError: a proxy's own"
    assert ended == [("a", False), "woken"]


def test_sender_waits_longer_than_the_server_which_says_what_held_it_up() -> None:
    """A slow server notices the end of its 54 s when a bucket is full. It says whether its link was the limit."""
    waited = []

    async def answer(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("no answer")

    async def post() -> None:
        async with client_of(answer) as client:
            await client.post(REQUEST, 60.0)

    with pytest.raises(WeightUpdateError, match=r"a has not version 1 within weights\.timeout_s=60"):
        asyncio.run(post())
    assert waited == [61.0]


async def test_server_that_does_not_tell_its_state_within_five_seconds_is_not_up() -> None:
    waited = []

    def answer(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("no answer")

    async with client_of(answer) as client:
        assert await client.info() is None
    assert waited == [5.0]
