"""The connection between the actor and one of its workers: whole messages of any size over a socket pair.

    message = length (uint64, little-endian) | payload

Neither end ever blocks. The actor's end buffers bytes that the socket does not accept and sends them when the socket
is writable again. The worker's end runs in its event loop. There ``send`` waits, without blocking the loop, until the
actor has read most of the earlier messages, so that a slow actor slows the worker down instead of filling a buffer.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator

from pipelinerl.errors import StreamError

_LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 2**32 - 1
READ_BUDGET_BYTES = 32 * 2**20
"""The actor reads at most this much from one worker before it turns to the others."""


class ActorConnection:
    """The actor's end. Used by one thread.

    Example:
        >>> ours, theirs = socket.socketpair()
        >>> ActorConnection(ours).send(b"hello")
        >>> theirs.recv(100)[8:]
        b'hello'
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self._socket = sock
        self._outgoing: deque[memoryview] = deque()
        self._incoming = memoryview(bytearray(_LENGTH.size))
        self._filled = 0
        self._in_payload = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether ``flush`` has something to send once the socket is writable."""
        return bool(self._outgoing)

    def send(self, payload: bytes) -> None:
        """Sends as much of the message as the socket accepts. ``flush`` sends the rest."""
        self._outgoing.append(memoryview(_LENGTH.pack(len(payload))))
        self._outgoing.append(memoryview(payload))
        self.flush()

    def flush(self) -> None:
        """Sends as much as the socket accepts. Raises ``OSError`` if the worker is gone."""
        while self._outgoing:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                return
            if sent < len(self._outgoing[0]):
                self._outgoing[0] = self._outgoing[0][sent:]
            else:
                self._outgoing.popleft()

    def receive(self) -> list[memoryview]:
        """Returns the messages that have arrived completely. Raises ``EOFError`` or ``OSError`` if the worker is gone.

        Messages that the worker sent before it ended are returned before the error is raised.
        """
        messages: list[memoryview] = []
        budget = READ_BUDGET_BYTES
        while budget > 0:
            try:
                count = self._socket.recv_into(self._incoming[self._filled :])
            except BlockingIOError:
                break
            except OSError:
                if messages:
                    break
                raise
            if not count:
                if messages:
                    break
                raise EOFError
            self._filled += count
            budget -= count
            if self._filled == len(self._incoming):
                messages += self._complete()
        return messages

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> list[memoryview]:
        """Handles a full buffer. It is either a length, after which the payload is read, or a payload."""
        whole, self._filled = self._incoming, 0
        if self._in_payload:
            self._in_payload = False
            self._incoming = memoryview(bytearray(_LENGTH.size))
            return [whole]
        (length,) = _LENGTH.unpack(whole)
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise OSError(f"a message of {length} bytes: the worker's process is damaged")
        self._in_payload = True
        self._incoming = memoryview(bytearray(length))
        return []


class WorkerConnection:
    """The worker's end, in its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, sock: socket.socket) -> "WorkerConnection":
        """Takes ownership of the socket."""
        sock.set_inheritable(False)
        sock.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=sock, limit=2**20))

    async def send(self, payload: bytes) -> None:
        """Sends one message, after waiting for its turn and for the actor. Cancelling it never sends half a message."""
        if len(payload) > MAX_MESSAGE_BYTES:
            raise StreamError(f"a message of {len(payload)} bytes: at most {MAX_MESSAGE_BYTES} can be sent")
        async with self._turn:
            self._writer.write(_LENGTH.pack(len(payload)))
            self._writer.write(payload)
            await self._writer.drain()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields the actor's messages until it closes the connection."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                yield await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return

    async def close(self) -> None:
        """Sends the remaining bytes, then closes."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
