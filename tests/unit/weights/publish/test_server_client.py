"""What the sender makes of a server that does not answer an update in time."""

import asyncio

import httpx
import pytest

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address, ParamSpec, PayloadRange, WeightUpdateRequest
from pipelinerl.weights.publish.server_client import ServerClient
from pipelinerl.world import Job


def test_sender_waits_longer_than_the_server_which_says_what_held_it_up() -> None:
    """A slow server notices the end of its 54 s when a bucket is full. It says whether its link was the limit."""
    waited = []

    async def answer(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["read"])
        raise httpx.ReadTimeout("no answer")

    async def post() -> None:
        parts = ((PayloadRange(start=0, end=4, sources=(Address("trainer", 1),)),),)
        request = WeightUpdateRequest(
            sender="t",
            version=1,
            params=(ParamSpec("w", "uint8", (4,)),),
            workers=parts,
            transport="tcp",
            bucket_bytes=64,
            timeout_s=54.0,
            stall_s=5.0,
        )
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as http:
            await ServerClient(Job(name="a", kind="actor_llm"), http).post(request, 60.0)

    with pytest.raises(WeightUpdateError, match=r"a has not version 1 within weights\.timeout_s=60"):
        asyncio.run(post())
    assert waited == [61.0]
