"""A network between client and endpoint that loses its first two connections, so that the client asks again.

The endpoint sees the first request cancelled while it samples an answer. It answers the second, and the answer is lost.
Later connections hold. It knows nothing of HTTP: whoever asks again has a new connection.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

LONGEST_WAIT_S = 10.0


@asynccontextmanager
async def unreliable(url: str, sampling: Callable[[], bool], patient: bool) -> AsyncIterator[str]:
    """Opens the network and yields the address that a client is given instead of ``url``.

    Args:
        url: of the endpoint.
        sampling: whether the endpoint has begun the first answer.
        patient: the client keeps the first connection until it leaves by itself, for ``LONGEST_WAIT_S`` at most.
    """
    endpoint = urlsplit(url)
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun = await reader.read(2**16)
        if not begun:  # left before it asked
            writer.close()
            return
        number = next(numbers)
        answers, requests = await asyncio.open_connection(endpoint.hostname, endpoint.port)
        requests.write(begun)
        asking = asyncio.create_task(_copy(reader, requests))
        try:
            if number == 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LONGEST_WAIT_S):
                        while not sampling():  # noqa: ASYNC110 — the state of a rollout tells nobody
                            await asyncio.sleep(0.005)
                        requests.close()
                        if patient:
                            await asking
            elif number == 1:
                await answers.read(1)
            else:
                answering = asyncio.create_task(_copy(answers, writer))
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
                answering.cancel()
        finally:
            asking.cancel()
            requests.close()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield endpoint._replace(netloc=f"127.0.0.1:{server.sockets[0].getsockname()[1]}").geturl()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes on what arrives until one of the two sides leaves."""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()
