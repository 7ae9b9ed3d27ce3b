"""Messages of any size between the actor and a worker: whole, in order, and nobody waits for nobody."""

import asyncio
import selectors
import socket
from collections.abc import AsyncIterator

import pytest
import uvloop

from pipelinerl.actor.connection import READ_BYTES, WRITE_BYTES, ActorConnection, WorkerConnection
from tests.says import says

MB = 2**20


def sockets() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()


def receive(connection: ActorConnection, count: int) -> list[memoryview]:
    """Reads and writes as ``RolloutWorkers.poll`` does until ``count`` messages are here and everything is sent."""
    messages: list[memoryview] = []
    with selectors.DefaultSelector() as selector:
        key = selector.register(connection, selectors.EVENT_READ)
        while len(messages) < count or connection.has_outgoing:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_outgoing else 0)
            if key.events != wanted:
                key = selector.modify(connection, wanted)
            events = selector.select(10)
            assert events, "nothing came within 10 s"
            if events[0][1] & selectors.EVENT_WRITE:
                connection.flush()
            if events[0][1] & selectors.EVENT_READ:
                messages += connection.receive()
    return messages


def test_hundred_megabytes_both_ways_at_once_arrive_whole_and_in_order() -> None:
    """Both ends send first and read later: with a blocking ``send`` on either side both would wait for ever."""
    here, there = sockets()
    ours = ActorConnection(here)
    to_worker = [bytes([i]) * (100 * MB if i == 1 else i + 1) for i in range(3)]
    to_actor = [bytes([i + 10]) * (100 * MB if i == 1 else i + 1) for i in range(3)]
    for message in to_worker:
        ours.send(message)
    assert ours.has_outgoing

    async def worker() -> list[bytes]:
        theirs = await WorkerConnection.open(there)
        sending = [asyncio.create_task(theirs.send(message)) for message in to_actor]
        messages = theirs.messages()
        received = [await anext(messages) for _ in to_worker]
        await asyncio.gather(*sending)
        await theirs.close()
        return received

    async def both() -> tuple[list[bytes], list[memoryview]]:
        return await asyncio.gather(worker(), asyncio.to_thread(receive, ours, len(to_actor)))

    received, answered = uvloop.run(both())
    assert [bytes(message) for message in received] == to_worker
    assert [bytes(message) for message in answered] == to_actor
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


@pytest.fixture
async def ends() -> AsyncIterator[tuple[ActorConnection, WorkerConnection]]:
    here, there = sockets()
    ours, theirs = ActorConnection(here), await WorkerConnection.open(there)
    yield ours, theirs
    ours.close()
    await theirs.close()


async def test_worker_waits_for_an_actor_that_does_not_read_and_its_loop_goes_on(
    ends: tuple[ActorConnection, WorkerConnection],
) -> None:
    """Of ten messages one is in the connection; nine wait for their turn and are not copied."""
    ours, theirs = ends
    sending = [asyncio.create_task(theirs.send(bytes([i]) * MB)) for i in range(10)]
    for _ in range(5):
        await asyncio.sleep(0)  # the loop turns
    assert not any(task.done() for task in sending)
    assert theirs._writer.transport.get_write_buffer_size() <= MB + 8
    messages = await asyncio.to_thread(receive, ours, 10)
    await asyncio.gather(*sending)
    assert [(message[0], len(message)) for message in messages] == [(i, MB) for i in range(10)]


async def test_cancelled_send_leaves_no_half_message(ends: tuple[ActorConnection, WorkerConnection]) -> None:
    ours, theirs = ends
    sending = [asyncio.create_task(theirs.send(bytes([i]) * MB)) for i in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sending[0].cancel()  # it is being written
    sending[1].cancel()  # it waits for its turn
    messages = await asyncio.to_thread(receive, ours, 2)
    assert [message[0] for message in messages] == [0, 2]


async def test_messages_of_every_size_arrive_whole_and_in_order(ends: tuple[ActorConnection, WorkerConnection]) -> None:
    """Sizes around the limits of both ends' buffers, each between many small messages."""
    ours, theirs = ends
    limits = [READ_BYTES - 8, READ_BYTES, WRITE_BYTES, WRITE_BYTES - 8, 2 * MB]
    sizes = [size for limit in limits for size in (*([100] * 30), limit - 1, limit, limit + 1)]
    sent = [bytes([i % 251]) * size for i, size in enumerate(sizes)]
    receiving = asyncio.create_task(asyncio.to_thread(receive, ours, len(sent)))
    await asyncio.gather(*(theirs.send(message) for message in sent))
    assert [bytes(message) for message in await receiving] == sent


async def test_short_messages_of_one_turn_are_one_write(
    ends: tuple[ActorConnection, WorkerConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    writes: list[list[bytes]] = []
    write = theirs._writer.writelines

    def counted(parts: list[bytes]) -> None:
        writes.append(parts)
        write(parts)

    monkeypatch.setattr(theirs._writer, "writelines", counted)
    await asyncio.gather(*(theirs.send(bytes([i])) for i in range(8)))
    assert [bytes(message) for message in await asyncio.to_thread(receive, ours, 8)] == [bytes([i]) for i in range(8)]
    assert len(writes) == 1


def test_messages_before_the_end_of_a_worker_are_received_then_its_end() -> None:
    here, there = sockets()
    ours = ActorConnection(here)
    there.sendall((3).to_bytes(8, "little") + b"one" + (9).to_bytes(8, "little") + b"cut")
    there.close()
    assert [bytes(message) for message in ours.receive()] == [b"one"]
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_length_that_cannot_be_is_refused() -> None:
    here, there = sockets()
    ours = ActorConnection(here)
    there.sendall(b"\xff" * 8)
    with pytest.raises(OSError, match=says(f"{(1 << 64) - 1} bytes", "worker", "damaged")):
        ours.receive()
    ours.close()
    there.close()
