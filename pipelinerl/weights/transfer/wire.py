"""Framed connections between processes that hold weights: TCP or TLS, authenticated both ways by the run's secret.

    frame = kind (1 byte) | length (8 bytes) | body

Not a Gloo group: it fails as a whole when one member dies, and cannot continue at a byte offset with another member.
Every wait has a patience: the seconds that may pass without a byte. ``close`` from any thread ends a wait.
"""

import contextlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import sys
import time
from typing import Any, TypeVar

import msgspec
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import Address
from pipelinerl.world.network import listen_address
from pipelinerl.world.tls import WIRE_NAME, wire_contexts

DATA, ALIVE, UNKNOWN, GONE, MESSAGE, OTHER, NO_GROUP = range(7)
"""Kinds of frames: bytes, no bytes yet, unknown key, withdrawn key, a struct of `protocol`, another shard's key, not in
this NCCL group."""

LOOPBACK = "127.0.0.1"
HANDSHAKE_S = 5.0
"""Longest wait for a connection, and for each byte of the handshake: a stranger that connects and is silent is left."""
TICKS = 4
"""Number of times that a blocked socket call returns within its patience."""
MAX_MESSAGE_BYTES = 64 << 20
"""Longest message. The longest one lists the parameters of a model: a mixture of experts has some megabytes of them."""
RECORD_BYTES = 16 << 10
"""The longest record of TLS. One is sent at a time, because OpenSSL wants the same bytes again after a time-out."""
_HEADER = struct.Struct("!BQ")
_MAGIC = b"PRLW1"
_NONCE_BYTES = 32  # as long as the digest

T = TypeVar("T")


class WireError(WeightUpdateError):
    """The other end is gone, silent, or does not speak our protocol."""


class Connection:
    """A connection whose two ends have authenticated each other. One thread uses it at a time."""

    def __init__(self, sock: socket.socket, patience_s: float):
        self._socket = sock
        self._is_closed = False
        self._is_encrypted = isinstance(sock, ssl.SSLSocket)
        self._at_once, self._flags = (RECORD_BYTES, 0) if self._is_encrypted else (sys.maxsize, socket.MSG_WAITALL)
        self._nothing_yet: type[OSError] = TimeoutError if self._is_encrypted else BlockingIOError
        if not self._is_encrypted:
            sock.settimeout(None)  # the kernel's time-outs let a whole bucket be one call
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_patience(patience_s)

    @classmethod
    def dial(cls, address: Address, secret: str, patience_s: float) -> "Connection":
        """Connects to a listener.

        Raises:
            WireError: there is no answer, or the listener does not know the secret.
        """
        contexts = wire_contexts(secret)
        try:
            sock = socket.create_connection((address.host, address.port), min(patience_s, HANDSHAKE_S))
            if contexts:
                sock = _encrypted(sock, contexts[1], server_hostname=WIRE_NAME)
        except OSError as error:
            raise WireError(f"{address}: {error}") from error
        connection = cls(sock, min(patience_s, HANDSHAKE_S))
        try:
            _authenticate(connection, secret, b"dialler", b"listener")
        except WireError:
            connection.close()
            raise
        connection.set_patience(patience_s)
        return connection

    @classmethod
    def accept(cls, sock: socket.socket, secret: str) -> "Connection":
        """Returns the listener's end of a new connection.

        Raises:
            WireError: the dialler does not know the secret. The socket is closed.
        """
        if contexts := wire_contexts(secret):
            sock.settimeout(HANDSHAKE_S)
            try:
                sock = _encrypted(sock, contexts[0], server_side=True)
            except OSError as error:
                raise WireError(f"no TLS handshake: {error}") from error
        connection = cls(sock, HANDSHAKE_S)
        try:
            _authenticate(connection, secret, b"listener", b"dialler")
        except WireError:
            connection.close()
            raise
        return connection

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end has closed the connection (or has sent unexpected bytes)."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # it is closed
            return True
        return bool(poll.poll(0))

    def set_patience(self, patience_s: float) -> None:
        """Makes later waits fail after ``patience_s`` seconds without a byte. Infinity = never."""
        self._patience_s = patience_s
        tick = max(min(patience_s / TICKS, 1e6), 0.01)
        if self._is_encrypted:
            self._socket.settimeout(tick)
            return
        timeval = struct.pack("@ll", int(tick), int(tick % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, option, timeval)

    def send(self, kind: int, body: bytes = b"") -> None:
        self.send_bytes(memoryview(_HEADER.pack(kind, len(body)) + body))

    def send_message(self, message: msgspec.Struct) -> None:
        self.send(MESSAGE, msgspec.json.encode(message))

    def send_header(self, kind: int, length: int) -> None:
        """Sends only the header. The body follows through ``send_bytes`` or outside the connection."""
        self.send_bytes(memoryview(_HEADER.pack(kind, length)))

    def send_bytes(self, view: memoryview) -> None:
        """Sends all of ``view``, as fast as the other end accepts it."""
        sent, moved = 0, time.monotonic()
        while sent < len(view):
            try:
                sent += self._socket.send(view[sent : sent + self._at_once])
                moved = time.monotonic()
            except self._nothing_yet:
                self.check_patience(moved)
            except OSError as error:
                raise WireError(f"the connection broke: {error}") from error

    def receive(self) -> tuple[int, int]:
        """Returns (kind, length) of the next frame. The caller must read the body next."""
        kind, length = _HEADER.unpack(self.read(_HEADER.size))
        return kind, length

    def read(self, length: int) -> bytes:
        body = bytearray(length)
        self.read_into(memoryview(body))
        return bytes(body)

    def read_into(self, view: memoryview) -> None:
        """Reads until ``view`` is full."""
        got, moved = 0, time.monotonic()
        while got < len(view):
            try:
                count = self._socket.recv_into(view[got:], 0, self._flags)
            except self._nothing_yet:
                self.check_patience(moved)
                continue
            except OSError as error:
                raise WireError(f"the connection broke: {error}") from error
            if count == 0:
                raise WireError("the connection was closed")
            got, moved = got + count, time.monotonic()

    def read_message(self, length: int, decoder: msgspec.json.Decoder[T]) -> T:
        """Reads and decodes the body of a `MESSAGE` frame.

        Args:
            decoder: made at import. Threads that look at a type for the first time at once have crashed msgspec.

        Raises:
            WireError: the body is not what the decoder takes.
        """
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes is over {MAX_MESSAGE_BYTES}")
        try:
            return decoder.decode(self.read(length))
        except (ValueError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error

    def ask(self, question: msgspec.Struct, decoder: msgspec.json.Decoder[T]) -> T:
        """Sends a question and waits for the answer, as long as signs of life come."""
        self.send_message(question)
        return self.receive_answer(decoder)

    def receive_answer(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Returns the next message, as long as signs of life come before it."""
        kind, length = self.receive()
        while kind == ALIVE:
            kind, length = self.receive()
        if kind != MESSAGE:
            raise WireError(f"a frame of kind {kind} came instead of an answer")
        return self.read_message(length, decoder)

    def end_sending(self) -> None:
        """Tells the other end that nothing more comes. It may still send."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)

    def close(self) -> None:
        """Closes the connection and ends every wait on it. Any thread may call it."""
        self.interrupt()
        self._socket.close()

    def interrupt(self) -> None:
        """Ends every wait on the connection. Its own thread closes it."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def check_patience(self, moved: float) -> None:
        """Raises if the connection was interrupted, or if its patience has passed since the last byte at ``moved``."""
        if self._is_closed:
            raise WireError("the connection was closed")
        if time.monotonic() - moved >= self._patience_s:
            raise WireError(f"not a byte for {self._patience_s:g} s")


def _encrypted(sock: socket.socket, context: ssl.SSLContext, **options: Any) -> socket.socket:
    """Does the handshake of TLS within the socket's time-out. Closes the socket if that fails."""
    try:
        return context.wrap_socket(sock, **options)
    except OSError:
        sock.close()
        raise


def _authenticate(connection: Connection, secret: str, mine: bytes, theirs: bytes) -> None:
    """Shows the other end that this end knows the secret, and checks the same of it. Nonces prevent a replay."""
    if not secret:
        raise WireError("there is no secret: every connection is refused")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.send_bytes(memoryview(_MAGIC + nonce))
    hello = connection.read(len(_MAGIC) + _NONCE_BYTES)
    if not hello.startswith(_MAGIC):
        raise WireError("the other end does not speak this protocol")
    other = hello[len(_MAGIC) :]
    connection.send_bytes(memoryview(_response(secret, mine, nonce, other)))
    expected = _response(secret, theirs, other, nonce)
    if not hmac.compare_digest(connection.read(len(expected)), expected):
        raise WireError("the other end does not know the run's secret")


def _response(secret: str, role: bytes, own: bytes, other: bytes) -> bytes:
    return hmac.digest(secret.encode(), role + own + other, "sha256")


def listen(host: str, port: int = 0) -> socket.socket:
    """Opens a listener for ``host``, on its address alone if that is one of this node. Port 0 = any free port."""
    if address := listen_address(host):
        return socket.create_server((address, port))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def view_of(tensor: torch.Tensor) -> memoryview:
    """Returns a memoryview of a contiguous uint8 tensor in host memory."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an array is a buffer
