"""Serves a process's shelf to takers. Each trainer rank and each server worker has one giver.

Consumes: connections with questions (`Get`, `Have`, at a worker `Take` from its own server, at a trainer rank
`Describe` and `Write` from rank 0, and `Sum` from servers' workers).
Produces: available bytes, and signs of life while it waits for the others.
Waits for: bytes on the shelf, takers. Each taker has its own thread, so a frozen taker does not delay others.
Ends: at ``close``.
"""

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from pipelinerl.config.backends import Carriage
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.carriage import CPU, Carrier, make_carrier
from pipelinerl.weights.gathering import gathered
from pipelinerl.weights.protocol import (
    Address,
    Describe,
    Description,
    Failed,
    Get,
    Had,
    Have,
    Order,
    Question,
    Staged,
    Sum,
    Summed,
    Take,
    Write,
    Written,
)
from pipelinerl.weights.shelf import OtherShardError, Shelf, WithdrawnError
from pipelinerl.weights.wire import ALIVE, DATA, GONE, MESSAGE, OTHER, UNKNOWN, Connection, WireError, listen

log = logging.getLogger(__name__)

TAKER_PATIENCE_S = 30.0
"""A taker that accepts no byte for so long is disconnected. It can reconnect and continue at its offset."""
BEAT_S = 0.25
_questions: msgspec.json.Decoder[Get | Have | Order] = msgspec.json.Decoder(Question)


class PendingWork(Protocol):
    """An order that takes its time: an update that a worker pulls, a file that a trainer rank writes."""

    def reply(self, timeout_s: float) -> Staged | Written | Failed | None:
        """Returns the result, or None if the work is still under way after ``timeout_s``."""

    def abandon(self) -> None:
        """Stops the work, because its caller no longer waits for it."""


class Giver:
    """Listens on its own port and serves a shelf.

    Args:
        shelf: the bytes to serve.
        secret: the run's secret, which takers must know.
        host: the name under which others reach this process.
        port: 0 = any free port.
        device: where NCCL and IPC buckets lie.
        on_order: follows an order: a worker starts an update, a trainer rank describes, adds up or writes its stripe.
        pace: called with the number of bytes before they are sent (benchmarks limit links with it).
    """

    def __init__(
        self,
        shelf: Shelf,
        *,
        secret: str,
        host: str,
        port: int = 0,
        device: torch.device = CPU,
        on_order: Callable[[Order], "PendingWork | Description | Summed"] | None = None,
        pace: Callable[[int], None] | None = None,
    ):
        self._shelf, self._secret, self._device = shelf, secret, device
        self._on_order, self._pace = on_order, pace or (lambda num_bytes: None)
        self._listener = listen(host, port)
        self.address = Address(host, self._listener.getsockname()[1])
        self.num_bytes = 0
        """Payload bytes given so far."""
        self._connections: set[Connection] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="weight-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.interrupt()
        self._thread.join()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if not self._is_closed:
                    log.exception("event=weight_listener_ended")
                return
            threading.Thread(target=self._serve, args=(sock,), name="weight-giver", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        """Serves one connection from its handshake to its end."""
        try:
            connection = Connection.accept(sock, self._secret)
        except WireError as error:
            log.warning("event=weight_taker_refused error=%s", error)
            return
        with self._lock:
            self._connections.add(connection)
        try:
            self._answer_all(connection)
        except WireError as error:
            log.debug("event=weight_taker_left error=%s", error)
        except Exception:  # the thread's boundary: the taker continues with another source
            log.exception("event=weight_giver_failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer_all(self, connection: Connection) -> None:
        carriers: dict[Carriage, Carrier] = {}
        while not self._is_closed:
            connection.set_patience(math.inf)
            kind, length = connection.receive()
            if kind != MESSAGE:
                raise WireError(f"a frame of kind {kind} came instead of a question")
            question: Get | Have | Order = connection.read_message(length, _questions)
            connection.set_patience(TAKER_PATIENCE_S)
            match question:
                case Get():
                    if question.carriage not in carriers:
                        carrier = make_carrier(question.carriage, connection, self._device, gives=True)
                        carriers[question.carriage] = carrier
                    self._give(connection, question, carriers[question.carriage])
                case Have():
                    item = self._shelf.find(question.key)
                    is_here = item is not None and item.shard == question.shard
                    end = item.filled(question.start) if item and is_here else question.start
                    connection.send_message(Had(end=end))
                case Take() | Describe() | Sum() | Write():
                    self._obey(connection, question)

    def _give(self, connection: Connection, get: Get, carrier: Carrier) -> None:
        """Sends the requested bytes as they become available."""
        start = get.start
        while start < get.end:
            end = min(start + get.bucket_bytes, get.end)
            try:
                item = self._shelf.wait_for(get.key, start, end, get.beat_s, shard=get.shard)
                if item is None:
                    connection.send(ALIVE if self._shelf.find(get.key) else UNKNOWN)
                    continue
                with self._shelf.reading(item, connection):
                    is_shard = item.shard == get.shard
                    bucket = item.slice(start, end) if is_shard else gathered(item, get.runs, start, end)
                    self._give_bucket(connection, bucket, carrier)
            except WithdrawnError:
                connection.send(GONE)
                return
            except OtherShardError:
                connection.send(OTHER)
                return
            start = end

    def _give_bucket(self, connection: Connection, bucket: torch.Tensor, carrier: Carrier) -> None:
        self._pace(bucket.numel())
        connection.send_header(DATA, bucket.numel())
        carrier.give(connection, bucket)
        self.num_bytes += bucket.numel()

    def _obey(self, connection: Connection, order: Order) -> None:
        """Has the process follow an order. The caller abandons an update by hanging up."""
        try:
            if self._on_order is None:
                raise WeightUpdateError("this process only gives")
            work = self._on_order(order)
        except Exception as error:  # the error is the answer
            connection.send_message(Failed(error=f"{type(error).__name__}: {error}"))
            return
        if isinstance(work, Description | Summed):
            connection.send_message(work)
            return
        while (reply := work.reply(BEAT_S)) is None:
            if connection.is_hung_up:
                work.abandon()
                return
            connection.send(ALIVE)
        connection.send_message(reply)
