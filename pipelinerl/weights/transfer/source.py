"""Serves a process's buffer registry to pullers. Each trainer rank and each server worker has one source server.

Consumes: connections with questions. Produces: available bytes, and between them how far this process is. Waits for:
bytes on the registry, pullers, each in its own thread. Ends: at ``close``.
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import torch

from pipelinerl.config.backends import TransportName
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import (
    Address,
    Describe,
    Description,
    Failed,
    Get,
    Joined,
    JoinGroup,
    Order,
    Progress,
    PullUpdate,
    Question,
    Staged,
    Sum,
    Summed,
    Write,
    Written,
)
from pipelinerl.weights.transfer.bucket import CPU, TRANSPORTS, BucketTransport, NcclTransport
from pipelinerl.weights.transfer.buffers import BufferRegistry, OtherShardError, WithdrawnError
from pipelinerl.weights.transfer.nccl import Groups, VllmNccl
from pipelinerl.weights.transfer.shard import gather_runs
from pipelinerl.weights.transfer.wire import (
    ALIVE,
    DATA,
    GONE,
    MESSAGE,
    NO_GROUP,
    OTHER,
    UNKNOWN,
    Connection,
    WireError,
    listen,
)

log = logging.getLogger(__name__)

PULLER_PATIENCE_S = 30.0
"""A puller that accepts no byte for this long is disconnected. It can reconnect and continue at its offset."""
BEATS = 4
"""Number of signs of life that a source sends within ``stall_s``, at least."""
BEAT_S = 0.25
"""Time between two signs of life while an order is followed."""
OLDER_SHARE = 10
"""A puller of an older version gets at most 1 / this of the uplink while others pull the newest."""
TELL_S, IDLE_TELL_S = 0.1, 0.25
"""Longest time between two messages to a puller, while bytes go to it and while there are none."""
_questions: msgspec.json.Decoder[Get | JoinGroup | Order] = msgspec.json.Decoder(Question)


class PendingWork(Protocol):
    """An order that takes its time: an update that a worker pulls, a file that a trainer rank writes."""

    def reply(self, timeout_s: float) -> Staged | Written | Failed | None:
        """Returns the result, or None if the work is still under way after ``timeout_s``."""

    def abandon(self) -> None:
        """Stops the work, because its caller no longer waits for it."""


class SourceServer:
    """Listens on its own port and serves a buffer registry.

    Args:
        host: the name under which others reach this process.
        port: 0 = any free port.
        device: where NCCL and IPC buckets lie.
        on_order: follows an order: a worker starts an update, a trainer rank describes, adds up or writes its stripe.
        pace: called with the number of bytes before they are sent (benchmarks limit links with it).
    """

    def __init__(
        self,
        registry: BufferRegistry,
        *,
        secret: str,
        host: str,
        port: int = 0,
        device: torch.device = CPU,
        on_order: Callable[[Order], PendingWork | Description | Summed] | None = None,
        pace: Callable[[int], None] | None = None,
    ):
        self._registry, self._secret, self._device = registry, secret, device
        self._on_order, self._pace = on_order, pace or (lambda num_bytes: None)
        self._listener = listen(host, port)
        self.address = Address(host, self._listener.getsockname()[1])
        self.num_bytes = 0
        """Payload bytes sent so far. A bucket counts before it leaves, so whoever has received it finds it counted."""
        self.groups = Groups(lambda: VllmNccl(device))
        """The NCCL groups of this process."""
        if device.type == "cuda":
            self.groups.preload()
        self._newest = ""
        """Key of the version that goes first. Empty = all are alike."""
        self._connections: set[Connection] = set()
        self._pulled: Counter[str] = Counter()
        """Connections over which a key is pulled."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, name="weight-listener", daemon=True)
        self._thread.start()

    def prefer(self, key: str) -> None:
        """Has the version of this key go first. Pullers of others get little of the uplink while this one is pulled."""
        self._newest = key

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
            try:
                threading.Thread(target=self._serve, args=(sock,), name="weight-source", daemon=True).start()
            except RuntimeError as error:  # at a limit of threads, the puller tries again
                log.warning("event=weight_taker_refused error=%s", error)
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
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
        except Exception:  # the thread's boundary: the puller continues with another source
            log.exception("event=weight_giver_failed")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _answer_all(self, connection: Connection) -> None:
        transports = dict[TransportName, BucketTransport]()
        while not self._is_closed:
            connection.set_patience(math.inf)
            kind, length = connection.receive()
            if kind != MESSAGE:
                raise WireError(f"a frame of kind {kind} came instead of a question")
            question: Get | JoinGroup | Order = connection.read_message(length, _questions)
            connection.set_patience(PULLER_PATIENCE_S)
            match question:
                case Get():
                    self._answer_get(connection, question, transports)
                case JoinGroup():
                    self._join(connection, question)
                case PullUpdate() | Describe() | Sum() | Write():
                    self._obey(connection, question)

    def _join(self, connection: Connection, order: JoinGroup) -> None:
        """Is a member of an NCCL group until the other end hangs up, or the group breaks."""
        try:
            self.groups.join(order, connection)
        except WeightUpdateError as error:
            connection.send_message(Failed(error=str(error)))
            return
        try:
            connection.send_message(Joined())
            connection.set_patience(math.inf)
            connection.receive()
        finally:
            self.groups.leave(order.name)

    def _answer_get(self, connection: Connection, get: Get, transports: dict[TransportName, BucketTransport]) -> None:
        bucket_transport: BucketTransport
        if get.transport == "nccl":
            group = self.groups.get(get.group)
            if group is None:
                connection.send(NO_GROUP)
                return
            patience_s = BEATS * get.beat_s
            connection.set_patience(patience_s)
            bucket_transport = NcclTransport(group, get.member, patience_s)
        else:
            if get.transport not in transports:
                transports[get.transport] = TRANSPORTS[get.transport](self._device)
            bucket_transport = transports[get.transport]
        with self._counted(get.key):
            self._send_bytes(connection, get, bucket_transport)

    def _send_bytes(self, connection: Connection, get: Get, bucket_transport: BucketTransport) -> None:
        start, told = get.start, -math.inf
        while start < get.end:
            end = min(start + get.bucket_bytes, get.end)
            try:
                item = self._registry.wait_for(get.key, start, end, min(get.beat_s, IDLE_TELL_S), shard=get.shard)
                here = item or self._registry.find(get.key)
                if here is None:
                    connection.send(UNKNOWN)
                elif item is None or time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    is_shard = here.shard == get.shard
                    connection.send_message(Progress(end=here.filled(start) if is_shard else get.end))
                if item is None:
                    continue
                with self._registry.reading(item, connection):
                    if item.shard == get.shard:
                        bucket = item.slice(start, end)
                    else:
                        bucket = gather_runs(get.runs, item.buffer, item.first, start, end)
                    began = time.monotonic()
                    self._send_bucket(connection, bucket, bucket_transport)
                self._leave_uplink(get, time.monotonic() - began)
            except WithdrawnError:
                connection.send(GONE)
                return
            except OtherShardError:
                connection.send(OTHER)
                return
            start = end

    def _leave_uplink(self, get: Get, seconds: float) -> None:
        """Leaves the uplink to the newest version, after ``seconds`` for a bucket of an older one."""
        if self._is_newest(get.key):
            return
        with self._lock:
            is_wanted = any(self._is_newest(key) for key in self._pulled)
        if is_wanted:
            time.sleep(min(seconds * (OLDER_SHARE - 1), get.beat_s))

    def _is_newest(self, key: str) -> bool:
        """Whether a key is the newest version's, or that of its difference from an older one."""
        return not self._newest or key == self._newest or key.startswith(f"{self._newest}-")

    @contextlib.contextmanager
    def _counted(self, key: str) -> Iterator[None]:
        with self._lock:
            self._pulled[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pulled[key] -= 1
                if not self._pulled[key]:
                    del self._pulled[key]

    def _send_bucket(self, connection: Connection, bucket: torch.Tensor, bucket_transport: BucketTransport) -> None:
        self._pace(bucket.numel())
        with self._lock:  # pullers have a thread each
            self.num_bytes += bucket.numel()
        connection.send_header(DATA, bucket.numel())
        bucket_transport.send_bucket(connection, bucket)

    def _obey(self, connection: Connection, order: Order) -> None:
        """Has the process follow an order. The caller abandons an update by hanging up."""
        try:
            if self._on_order is None:
                raise WeightUpdateError("this process only sends")
            work = self._on_order(order)
        except Exception as error:  # noqa: BLE001 — the error is the answer
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
