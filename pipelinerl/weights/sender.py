"""The trainer's end: snapshot the weights, push them to every server in parallel, report who holds them.

`WeightSender` decides which servers are in service: exactly those that took the newest version. A server that fails,
hangs beyond the time-out or restarts leaves service and delays nobody again; a watcher thread notices when it answers
again, and the trainer then re-admits it with the current weights.

The trainer goes on while a push runs: `send_async` returns when the snapshot is taken, `wait` collects the report.
"""

import contextlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import msgspec
import numpy as np
import torch
import torch.distributed as dist

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.attestor import FROM_FILE, Attestor, Expected, Miss
from pipelinerl.weights.delta import encode_delta
from pipelinerl.weights.digest import checksum
from pipelinerl.weights.group import TransferGroup, first_line, host_store, join
from pipelinerl.weights.layout import Layout, buckets
from pipelinerl.weights.probe import ProbeText
from pipelinerl.weights.protocol import (
    INFO_PATH,
    PATH,
    STALE,
    GroupSpec,
    ParamSpec,
    WeightInfo,
    WeightUpdateAnswer,
    WeightUpdateRequest,
)
from pipelinerl.world import Job
from pipelinerl.world.map import WEIGHT_PORTS_PER_SERVER

log = logging.getLogger(__name__)

WATCH_S = 1.0
WATCH_TIMEOUT_S = 5.0
RECEIVE_SHARE = 0.9
"""Share of the time-out in which all bytes must arrive, so that the server's own error comes before ours."""
GONE = "gone"
"""Instead of a version: nobody listens at the server's address."""


@dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """Who holds the version now, and what it cost."""

    version: int
    servers: tuple[str, ...]
    """All servers in service: each holds `version`."""
    pause_ms: tuple[float, ...]
    """Stall of decoding on each server of this push that took it."""
    swap_ms: tuple[float, ...]
    """The part of it in which the weights changed."""
    transfer_ms: float
    """The sender's wall time from the snapshot's end to the last answer."""
    errors: dict[str, str]
    """Servers that left service in this push, with the reason."""
    num_bytes: int = 0
    """Bytes sent per server (the largest, where some got a delta and some a dense update)."""


@dataclass
class Snapshot:
    """One version's bytes, unchanged until every push of it has ended."""

    version: int
    layout: Layout
    buffer: torch.Tensor
    base: torch.Tensor | None = None
    """Delta mode: the previous version's bytes, until the delta is encoded."""
    base_version: int | None = None
    delta: torch.Tensor | None = None
    checksum: "Future[str] | None" = None


@dataclass
class Link:
    """The connection to one server."""

    server: Job
    port: int
    client: httpx.Client
    watch_client: httpx.Client
    store: dist.TCPStore | None = None
    group: TransferGroup | None = None
    spec: GroupSpec | None = None
    held: int | None = None
    """Version whose bytes the server's staging holds."""
    in_service: bool = False
    is_up: bool = True
    """Worth a push: it answers, or nobody has asked yet."""
    is_expelled: bool = False
    """It missed its probe twice: never used again in this run."""
    pushes: int = 0
    """Counts ended pushes, so that the watcher can tell an answer that is older than one."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held for assignments only."""

    def drop(self) -> None:
        """Out of service, and out of mind until the watcher hears from it."""
        self.group = self.spec = self.held = None
        self.in_service = self.is_up = False

    def close(self) -> None:
        self.drop()
        self.store = None
        self.client.close()
        self.watch_client.close()


class WeightSender:
    """Pushes versions to the policy's servers. Used by the trainer's rank 0 alone.

    Args:
        servers: the world's `actor_llm` jobs.
        backend: gloo, nccl or ipc.
        bucket_mb: size of one broadcast.
        timeout_s: a server that has not taken an update within this leaves service.
        secret: the run's bearer secret.
        host: address on which this trainer's stores listen; the servers must reach it.
        port_base: first of two ports per server; 0 = free ones.
        device: where buckets must lie for the backend (the trainer's GPU); the snapshot itself is in host memory.
        delta: send only what changed where the server holds the previous version and that is smaller.
        probe_tolerance: servers are asked whether they use what they are sent (`attestor`); None = they are not.

    >>> sender = WeightSender(world.get("actor_llm"), backend="gloo", ...)
    >>> sender.send_async(version, named_tensors, specs)   # returns after the snapshot
    >>> report = sender.wait()
    >>> if sender.readmit_async(): report = sender.wait()   # between steps: a server came back or left
    """

    def __init__(
        self,
        servers: Sequence[Job],
        *,
        backend: str,
        bucket_mb: int,
        timeout_s: float,
        secret: str,
        host: str = "127.0.0.1",
        port_base: int = 0,
        device: torch.device | str = "cpu",
        delta: bool = False,
        probe_tolerance: float | None = None,
    ):
        self._backend, self._bucket_bytes, self._timeout_s = backend, bucket_mb << 20, timeout_s
        self._host, self._device, self._delta = host, _indexed(torch.device(device)), delta
        headers = {"Authorization": f"Bearer {secret}"}
        self._links = {
            server.name: Link(
                server=server,
                port=port_base + WEIGHT_PORTS_PER_SERVER * index if port_base else 0,
                client=httpx.Client(base_url=server.url, headers=headers, timeout=WATCH_TIMEOUT_S),
                watch_client=httpx.Client(base_url=server.url, timeout=WATCH_TIMEOUT_S),
                is_up=probe_tolerance is None,
            )
            for index, server in enumerate(servers)
        }
        self._attestor = None
        if probe_tolerance is not None:
            self._attestor = Attestor(
                servers, secret=secret, tolerance=probe_tolerance, timeout_s=timeout_s, report=self._take_miss
            )
        self._misses: queue.SimpleQueue[Miss] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(max(len(servers), 1), thread_name_prefix="weight-push")
        self._snapshot: Snapshot | None = None
        self._spare: torch.Tensor | None = None
        self._spare_read: Future[str] | None = None
        """The checksum that may still read the spare buffer."""
        self._digests = ThreadPoolExecutor(1, thread_name_prefix="weight-digest")
        self._push: Future[UpdateReport] | None = None
        self._announced: tuple[str, ...] = ()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weight-watcher", daemon=True)
        self._watcher.start()

    @property
    def in_service(self) -> tuple[str, ...]:
        """Servers that hold the newest version that was pushed."""
        return tuple(name for name, link in self._links.items() if link.in_service)

    @property
    def returning(self) -> tuple[str, ...]:
        """Servers out of service that answer."""
        return tuple(name for name, link in self._links.items() if link.is_up and not link.in_service)

    @property
    def is_exhausted(self) -> bool:
        """Whether every server has missed its probe for good."""
        return bool(self._links) and all(link.is_expelled for link in self._links.values())

    @property
    def wants_scores(self) -> bool:
        """Whether the next version's log-probabilities should be compared."""
        return self._attestor is not None and self._attestor.wants_scores

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int) -> ProbeText | None:
        """A text for the probe, from the first server that answers; None while none does."""
        return None if self._attestor is None else self._attestor.sample(shape, vocab_size, seed)

    def attest_with(self, text: ProbeText) -> None:
        """From now on servers that answer are calibrated on this text, and then count as up."""
        if self._attestor is not None:
            self._attestor.begin(text)

    def take_misses(self) -> list[Miss]:
        """Missed probes since the last call."""
        misses = []
        with contextlib.suppress(queue.Empty):
            while True:
                misses.append(self._misses.get_nowait())
        return misses

    def send(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        metadata: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
    ) -> UpdateReport:
        """`send_async` and `wait`."""
        self.send_async(version, params, metadata, scores)
        return self.wait()

    def send_async(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        metadata: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
    ) -> None:
        """Take a snapshot and push it in the background to all servers that answer.

        Args:
            version: optimizer steps behind these weights.
            params: full tensors under the checkpoint's names, in the order of ``metadata``; consumed one by one, so
                a sharded trainer may gather each when it is asked for.
            metadata: every parameter's name, dtype and full shape.
            scores: the trainer's log-probabilities of the probe's text with these weights, when it has them; None =
                they are not compared for this version.
        """
        assert self._push is None, "wait() for the previous update first"
        snapshot = self._take_snapshot(version, params, Layout(tuple(metadata)))
        if self._attestor is not None:
            snapshot.checksum = self._digests.submit(checksum, snapshot.buffer)
            self._attestor.expect(version, Expected(snapshot.checksum, scores))
        targets = [link for link in self._links.values() if link.in_service or link.is_up]
        self._start_push(snapshot, targets)

    def readmit_async(self) -> bool:
        """Push the newest snapshot to servers that came back; False if the servers in service stay the same.

        True also when one lost its weights: the report then names those that are left.
        """
        assert self._push is None, "wait() for the update under way first"
        if self._snapshot is None or (not self.returning and self.in_service == self._announced):
            return False
        self._start_push(self._snapshot, [self._links[name] for name in self.returning])
        return True

    @property
    def is_pushing(self) -> bool:
        """Whether an update is under way (its report has not been collected)."""
        return self._push is not None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._push is None or self._push.done()

    def wait(self) -> UpdateReport:
        """The report of the update under way. Ends within the time-out: every push has its own deadline."""
        assert self._push is not None, "no update is under way"
        try:
            report = self._push.result()
        finally:
            self._push = None
        self._announced = report.servers
        return report

    def close(self) -> None:
        """Stop watching and let go of all connections."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._digests.shutdown(wait=False, cancel_futures=True)
        self._watcher.join(WATCH_TIMEOUT_S)
        if self._attestor is not None:
            self._attestor.close()
        for link in self._links.values():
            link.close()

    def _take_snapshot(self, version: int, params: Iterable[tuple[str, torch.Tensor]], layout: Layout) -> Snapshot:
        """Copy into host memory that is allocated once (twice with delta: the previous version is the base)."""
        previous = self._snapshot
        if self._spare_read is not None:
            self._spare_read.result()
        if self._spare is None or self._spare.numel() != layout.num_bytes:
            self._spare = torch.zeros(layout.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        buffer, self._spare = self._spare, None
        layout.fill(buffer, params)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        snapshot = Snapshot(version, layout, buffer)
        if self._delta and previous is not None and previous.layout == layout:
            snapshot.base, snapshot.base_version = previous.buffer, previous.version
        if previous is not None:
            self._spare, self._spare_read = previous.buffer, previous.checksum
        self._snapshot = snapshot
        return snapshot

    def _start_push(self, snapshot: Snapshot, targets: Sequence[Link]) -> None:
        self._push = Future()
        arguments = (self._push, snapshot, targets)
        threading.Thread(target=self._run_push, args=arguments, name="weight-update", daemon=True).start()

    def _run_push(self, result: "Future[UpdateReport]", snapshot: Snapshot, targets: Sequence[Link]) -> None:
        """Pushes to all targets at once; ends when each has answered or run into its time-out."""
        started = time.monotonic()
        if snapshot.base is not None:
            snapshot.delta, snapshot.base = encode_delta(snapshot.base, snapshot.buffer), None
        pushes = {link.server.name: self._pool.submit(self._push_to, link, snapshot) for link in targets}
        answers, errors, sent = [], {}, 0
        for name, push in pushes.items():
            try:
                answer, num_bytes = push.result()
                answers.append(answer)
                sent = max(sent, num_bytes)
            except Exception as error:  # one server's failure, whatever it is, takes that server out of service
                reason = first_line(error)
                errors[name] = reason
                log.error("event=server_out_of_service server=%s version=%d error=%s", name, snapshot.version, reason)
        report = UpdateReport(
            version=snapshot.version,
            servers=self.in_service,
            pause_ms=tuple(answer.pause_ms for answer in answers),
            swap_ms=tuple(answer.swap_ms for answer in answers),
            transfer_ms=1e3 * (time.monotonic() - started),
            errors=errors,
            num_bytes=sent,
        )
        result.set_result(report)

    def _push_to(self, link: Link, snapshot: Snapshot) -> tuple[WeightUpdateAnswer, int]:
        """One server's update, dense if it refuses the delta; afterwards the server is in service or out of it."""
        deadline = time.monotonic() + self._timeout_s
        try:
            answer, num_bytes = self._update(link, snapshot, deadline)
        except BaseException:
            with link.lock:
                link.pushes += 1
                link.drop()
            raise
        with link.lock:
            link.pushes += 1
            link.held, link.in_service, link.is_up = snapshot.version, not link.is_expelled, False
        if self._attestor is not None:
            self._attestor.took(link.server.name, snapshot.version)
        return answer, num_bytes

    def _update(self, link: Link, snapshot: Snapshot, deadline: float) -> tuple[WeightUpdateAnswer, int]:
        """Build on what the server has from earlier updates; where it lost that, send everything anew."""
        has_base = snapshot.delta is not None and link.held == snapshot.base_version
        try:
            return self._transfer(link, snapshot, snapshot.delta if has_base else None, deadline)
        except WeightUpdateError as error:
            if STALE not in str(error):
                raise
        return self._transfer(link, snapshot, None, deadline)

    def _transfer(
        self, link: Link, snapshot: Snapshot, delta: torch.Tensor | None, deadline: float
    ) -> tuple[WeightUpdateAnswer, int]:
        """Bytes in one thread, request and answer in this one; whichever fails ends the other."""
        payload = snapshot.buffer if delta is None else delta
        if link.group is None or link.spec is None:
            link.spec = spec = self._new_group(link)
        else:
            link.spec = spec = msgspec.structs.replace(link.spec, is_new=False)
        request = WeightUpdateRequest(
            version=snapshot.version,
            params=snapshot.layout.specs,
            group=spec,
            bucket_bytes=self._bucket_bytes,
            timeout_s=RECEIVE_SHARE * (deadline - time.monotonic()),
            base_version=None if delta is None else snapshot.base_version,
            payload_bytes=None if delta is None else delta.numel(),
        )
        ended = threading.Event()
        transfer = threading.Thread(
            target=self._broadcast, args=(link, payload, deadline, ended), name="weight-bytes", daemon=True
        )
        transfer.start()
        try:
            answer = self._post(link, request, deadline)
            transfer.join()
            return answer, payload.numel()
        except BaseException:
            link.group = None
            raise
        finally:
            ended.set()

    def _post(self, link: Link, request: WeightUpdateRequest, deadline: float) -> WeightUpdateAnswer:
        timeout = httpx.Timeout(max(deadline - time.monotonic(), 0.1), connect=WATCH_TIMEOUT_S)
        body = msgspec.json.encode(request)
        headers = {"Content-Type": "application/json"}
        try:
            response = link.client.post(PATH, content=body, headers=headers, timeout=timeout)
        except httpx.TimeoutException as error:
            raise WeightUpdateError(
                f"{link.server.name} has not version {request.version} within weights.timeout_s={self._timeout_s:g}"
            ) from error
        except httpx.HTTPError as error:
            raise WeightUpdateError(f"{link.server.name} at {link.server.url}: {first_line(error)}") from error
        if response.status_code != 200:
            raise WeightUpdateError(f"{link.server.name} answered {response.status_code}: {response.text[:500]}")
        return msgspec.json.decode(response.content, type=WeightUpdateAnswer)

    def _broadcast(self, link: Link, payload: torch.Tensor, deadline: float, ended: threading.Event) -> None:
        """Sends all buckets; ends at the last, at the deadline, or when the server has answered already."""

        def check() -> None:
            if ended.is_set():
                raise WeightUpdateError("the server ended the transfer")

        group, spec, store = link.group, link.spec, link.store
        assert spec is not None
        assert store is not None
        try:
            if group is None:
                group = join(store, spec, 0, self._device, deadline, check)
                link.group = group
            for bucket in buckets(payload, self._bucket_bytes):
                group.broadcast(bucket, deadline, check)
        except (WeightUpdateError, RuntimeError) as error:
            if link.spec is spec:
                link.group = None
            log.warning("event=transfer_ended server=%s error=%s", link.server.name, first_line(error))

    def _new_group(self, link: Link) -> GroupSpec:
        """A fresh name in this server's store, for as many workers as the server says it has."""
        info = _weight_info(link.client)
        if link.store is None:
            link.store = host_store(self._host, link.port, self._timeout_s)
        return GroupSpec(
            backend=self._backend,  # type: ignore[arg-type]
            host=self._host,
            port=link.store.port,
            name=uuid.uuid4().hex,
            world_size=1 + info.transfer_workers,
            is_new=True,
        )

    def _watch(self) -> None:
        """Asks every server for its version once a second; ends when the sender is closed."""
        with ThreadPoolExecutor(max(len(self._links), 1), thread_name_prefix="weight-watch") as pool:
            while not self._closed.is_set():
                list(pool.map(self._watch_one, self._links.values()))
                self._closed.wait(WATCH_S)

    def _watch_one(self, link: Link) -> None:
        """A server that died or lost its weights (restarted) leaves service; one that answers may be re-admitted."""
        pushes = link.pushes
        version = _version_of(link)
        with link.lock:
            if link.pushes != pushes:
                return
            if link.in_service and version in (FROM_FILE, GONE):
                log.warning("event=server_lost_weights server=%s version=%s", link.server.name, version)
                link.drop()
                if self._attestor is not None:
                    self._attestor.left(link.server.name)
            if not link.in_service:
                link.is_up = version is not None and version != GONE and self._admits(link, version)

    def _admits(self, link: Link, version: str) -> bool:
        return not link.is_expelled and (self._attestor is None or self._attestor.admits(link.server.name, version))

    def _take_miss(self, miss: Miss) -> None:
        """Out of service; back with a whole push unless it was the second miss."""
        link = self._links[miss.server]
        with link.lock:
            link.held, link.in_service = None, False
            link.is_up, link.is_expelled = not miss.is_final, miss.is_final
        self._misses.put(miss)


def _indexed(device: torch.device) -> torch.device:
    """Communicators compare devices with their number."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _version_of(link: Link) -> str | None:
    """What the server says it holds; None if it does not answer, ``GONE`` if no process is there to answer."""
    with contextlib.suppress(httpx.HTTPError, WeightUpdateError):
        try:
            return _weight_info(link.watch_client).weight_version
        except httpx.ConnectError:
            return GONE
    return None


def _weight_info(client: httpx.Client) -> WeightInfo:
    """Ask through the engine loop, so that a frozen engine behind a live HTTP server does not count as up."""
    response = client.get(INFO_PATH)
    if response.status_code != 200:
        raise WeightUpdateError(f"{client.base_url}{INFO_PATH} answered {response.status_code}")
    try:
        return msgspec.json.decode(response.content, type=WeightInfo)
    except msgspec.DecodeError as error:
        raise WeightUpdateError(f"{client.base_url}{INFO_PATH} is not a PipelineRL server: {error}") from error
