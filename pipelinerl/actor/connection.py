"""The connection between the actor and one of its workers: whole messages of any size over a socket pair.

    message = length (uint64, little-endian) | payload

Neither end blocks. The actor's end buffers what the socket does not accept. The worker's ``send`` waits until the actor
has read most of the earlier messages.
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
READ_BYTES = 2**18
"""Messages that fit in this are read many at a time."""
WRITE_BYTES = 2**16
"""Shorter messages are written together with what comes before or after them."""


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
        self._read = memoryview(bytearray(READ_BYTES))
        self._large: memoryview | None = None
        """The payload that is being read, if it is too large for ``_read``."""
        self._filled = 0
        """Bytes that have arrived in ``_large``, or in ``_read`` without one."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether ``flush`` has something to send once the socket is writable."""
        return bool(self._outgoing)

    def send(self, payload: bytes) -> None:
        """Sends as much of the message as the socket accepts. ``flush`` sends the rest."""
        length = _LENGTH.pack(len(payload))
        if len(payload) < WRITE_BYTES:
            self._outgoing.append(memoryview(length + payload))
        else:
            self._outgoing += (memoryview(length), memoryview(payload))
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
        """Returns the messages that have arrived completely.

        Raises:
            EOFError, OSError: the worker is gone, and all that it sent was returned before.
        """
        messages: list[memoryview] = []
        budget = READ_BUDGET_BYTES
        while budget > 0:
            target = (self._read if self._large is None else self._large)[self._filled :]
            try:
                count = self._socket.recv_into(target)
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
            messages += self._complete()
            if count < len(target):
                break
        return messages

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> list[memoryview]:
        """Takes the messages that have arrived completely out of the buffer."""
        if self._large is not None:
            if self._filled < len(self._large):
                return []
            whole, self._large, self._filled = self._large, None, 0
            return [whole]
        messages: list[memoryview] = []
        start = 0
        while self._filled - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read, start)
            if not 0 < length <= MAX_MESSAGE_BYTES:
                raise OSError(f"a message of {length} bytes: the worker's process is damaged")
            first, end = start + _LENGTH.size, start + _LENGTH.size + length
            if end > self._filled:
                if end - start > len(self._read):
                    self._begin_large(first, length)
                    return messages
                break
            messages.append(memoryview(bytes(self._read[first:end])))
            start = end
        self._filled -= start
        self._read[: self._filled] = self._read[start : start + self._filled]
        return messages

    def _begin_large(self, first: int, length: int) -> None:
        """Reads the payload of ``length`` bytes that begins at ``first`` into a buffer of its own."""
        self._large = memoryview(bytearray(length))
        arrived = self._filled - first
        self._large[:arrived] = self._read[first : self._filled]
        self._filled = arrived


class WorkerConnection:
    """The worker's end, in its event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0

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
            await self._writer.drain()
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._write)  # one write per turn: each one wakes the actor
            self._unsent += (_LENGTH.pack(len(payload)), payload)
            self._unsent_bytes += len(payload)
            if self._unsent_bytes >= WRITE_BYTES:
                self._write()
                await self._writer.drain()

    def _write(self) -> None:
        if self._unsent:
            self._writer.writelines(self._unsent)
            self._unsent, self._unsent_bytes = [], 0

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
        self._write()
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
