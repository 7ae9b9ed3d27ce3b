"""A connection in clear and with TLS: what passes on the network, who is refused, and when a wait ends."""

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from pipelinerl.config.environment import CA_VARIABLE, SECRET_VARIABLE
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.transfer.wire import ALIVE, DATA, Connection, WireError, listen
from pipelinerl.world.tls import made_authority
from tests.says import says
from tests.sender_kit import wait_for

SECRET = "secret of a run"
DEADLINE_S = 20.0
PAYLOAD = os.urandom(64) * (3 << 14)  # 3 MiB, in which every 64 bytes are the same


@pytest.fixture(params=["clear", "tls"])
def wire(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "tls":
        monkeypatch.setenv(CA_VARIABLE, made_authority({SECRET_VARIABLE: SECRET}))
    return request.param


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[Address, Callable[[], Connection]]]:
    """The address of a listener, and what waits for the one connection that it accepts."""
    listener = listen("127.0.0.1")
    listener.settimeout(DEADLINE_S)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ends:
        accepted = pool.submit(lambda: Connection.accept(listener.accept()[0], SECRET))
        try:
            yield Address("127.0.0.1", listener.getsockname()[1]), lambda: accepted.result(DEADLINE_S)
        finally:
            if accepted.exception(DEADLINE_S) is None:
                ends.callback(accepted.result().close)
            listener.close()


@contextlib.contextmanager
def recorded(target: Address, into: bytearray) -> Iterator[Address]:
    """The address of a relay to ``target`` that keeps what passes from there."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(DEADLINE_S)

    def copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):  # one end has gone
            while piece := source.recv(1 << 16):
                kept += piece
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def relay() -> None:
        with listener.accept()[0] as near, socket.create_connection((target.host, target.port)) as far:
            there = threading.Thread(target=copy, args=(near, far, bytearray()))
            there.start()
            copy(far, near, into)
            there.join()

    thread = threading.Thread(target=relay)
    thread.start()
    try:
        yield Address("127.0.0.1", listener.getsockname()[1])
    finally:
        thread.join()
        listener.close()


def test_bytes_arrive_and_are_readable_on_the_network_only_without_tls(wire: str) -> None:
    seen = bytearray()
    with (
        both_ends() as (target, accepted),
        recorded(target, seen) as address,
        contextlib.closing(Connection.dial(address, SECRET, DEADLINE_S)) as dialler,
    ):
        dialler.send(DATA, b"question")
        listener = accepted()
        assert listener.read(listener.receive()[1]) == b"question"
        sending = threading.Thread(target=listener.send, args=(DATA, PAYLOAD))
        sending.start()
        kind, length = dialler.receive()
        assert (kind, dialler.read(length)) == (DATA, PAYLOAD)
        sending.join()
        assert not dialler.is_hung_up
        dialler.end_sending()
        wait_for(lambda: listener.is_hung_up)
        listener.close()
        with pytest.raises(WireError, match="closed"):
            dialler.receive()
    assert (PAYLOAD[:64] in seen) is (wire == "clear")


@pytest.mark.parametrize("secret", ["wrong", ""])
def test_nobody_without_the_secret_gets_a_connection(wire: str, secret: str) -> None:
    with both_ends() as (address, accepted):
        with pytest.raises(WireError):
            Connection.dial(address, secret, 2)
        with pytest.raises(WireError):
            accepted()


def test_end_in_clear_is_refused_by_one_with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA_VARIABLE, made_authority({SECRET_VARIABLE: SECRET}))
    with both_ends() as (address, accepted):
        with socket.create_connection((address.host, address.port)) as plain:
            plain.sendall(b"PRLW1" + bytes(32))
            with pytest.raises(WireError, match="TLS"):
                accepted()


def test_wait_ends_at_its_patience_and_when_another_thread_closes_it(wire: str) -> None:
    with both_ends() as (address, _), contextlib.closing(Connection.dial(address, SECRET, DEADLINE_S)) as dialler:
        dialler.set_patience(0.2)
        with pytest.raises(WireError, match=r"not a byte for 0\.2 s"):
            dialler.receive()
        with pytest.raises(WireError, match=r"not a byte for 0\.2 s"):
            dialler.send(DATA, bytes(64 << 20))  # more than the buffers of both ends take
    with both_ends() as (address, _), contextlib.closing(Connection.dial(address, SECRET, math.inf)) as dialler:
        closing = threading.Timer(0.1, dialler.interrupt)
        closing.start()
        with pytest.raises(WireError):
            dialler.receive()
        closing.join()


def test_message_of_more_than_64_mib_is_refused_before_it_is_read(wire: str) -> None:
    with both_ends() as (address, _), contextlib.closing(Connection.dial(address, SECRET, DEADLINE_S)) as dialler:
        with pytest.raises(WireError, match=says("message", 64 << 20)):
            dialler.read_message((64 << 20) + 1, msgspec.json.Decoder(Address))


def test_answer_comes_behind_signs_of_life(wire: str) -> None:
    with (
        both_ends() as (address, accepted),
        contextlib.closing(Connection.dial(address, SECRET, DEADLINE_S)) as dialler,
    ):
        listener = accepted()
        for kind in (ALIVE, ALIVE):
            listener.send(kind)
        listener.send_message(Address("a", 1))
        assert dialler.receive_answer(msgspec.json.Decoder(Address)) == Address("a", 1)
        listener.send(DATA)
        with pytest.raises(WireError, match=says("frame", "answer")):
            dialler.receive_answer(msgspec.json.Decoder(Address))
        dialler.close()


def test_stranger_is_left_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        waited.append(timeout)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "create_connection", connect)
    for patience_s in (2.0, 60.0):
        with pytest.raises(WireError, match="no answer"):
            Connection.dial(Address("stranger", 1), SECRET, patience_s)
    assert waited == [2.0, 5.0]
