"""The trainer's end: takes a snapshot of the weights, has every server pull it, announces who serves which version.

Consumes: versions from the training loop, the provider's servers, their answers, missed probes.
Produces: updates of servers, and on topic `trainer` a `WeightUpdateSuccess` whenever a server changes its version.
Waits for: servers, each in its own coroutine with a deadline. Ends: at ``close`` or with the first error, which the
training loop sees at its next call.

All servers that are ready when a version arrives form one chain (`chain`). A server that joins, returns, or was slow
pulls separately from servers that have the version. Each server is announced as soon as it serves the version, without
waiting for the slowest.
"""

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from pipelinerl.config.backends import Carriage
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.attestor import Attestor, Expected, Miss
from pipelinerl.weights.delta import encode_delta
from pipelinerl.weights.digest import checksum
from pipelinerl.weights.dispatch import Dispatch, chained, expected_s, joining
from pipelinerl.weights.giver import Giver
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.member import Member, UpdateOutcome
from pipelinerl.weights.news import Announcement, News, PushStats
from pipelinerl.weights.probe import ProbeText
from pipelinerl.weights.protocol import ParamSpec, WeightUpdateRequest
from pipelinerl.weights.roster import Roster
from pipelinerl.weights.shelf import Shelf
from pipelinerl.weights.snapshot import Snapshot, Snapshots
from pipelinerl.weights.supervision import Supervision
from pipelinerl.world import Job

RECEIVE_SHARE = 0.9
"""Share of the timeout in which all bytes must arrive, so that the server's own error comes before ours."""
SAMPLE_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class SenderSettings:
    """Settings of weight updates."""

    secret: str
    """The run's secret."""
    carriage: Carriage = "tcp"
    bucket_bytes: int = 8 << 20
    timeout_s: float = 120.0
    """A server that has not taken an update within this time leaves service."""
    stall_s: float = 5.0
    """A worker leaves a source that has sent no byte for so long."""
    host: str = "127.0.0.1"
    """The name under which servers reach this process."""
    port: int = 0
    """0 = any free port."""
    device: torch.device | str = "cpu"
    """Where buckets must lie for NCCL and IPC. Snapshots lie in host memory."""
    delta: bool = False
    """Send only the changes to servers that hold the previous version, if that is smaller."""
    probe_tolerance: float | None = None
    """`weights.probe_tolerance` for checking that servers use their weights (`attestor`). None = no checks."""


class WeightSender:
    """Sends weights to the servers. Only the trainer's rank 0 uses it.

    Args:
        servers: returns the policy's current servers. Called often.
        settings: settings of weight updates.
        announce: writes a message to topic `trainer`. Called from one thread.

    >>> sender = WeightSender(lambda: world.get("actor_llm"), settings, announce)
    >>> if not sender.is_busy:
    ...     sender.send(version, named_tensors, specs)     # returns after the snapshot
    >>> sender.wait_live(version, timeout_s=60)
    """

    def __init__(
        self,
        servers: Callable[[], Sequence[Job]],
        settings: SenderSettings,
        announce: Callable[[Announcement], object],
    ):
        self._settings = settings
        device = _indexed(torch.device(settings.device))
        shelf = Shelf()
        self.giver = Giver(shelf, secret=settings.secret, host=settings.host, port=settings.port, device=device)
        self._snapshots = Snapshots(uuid.uuid4().hex, shelf, device, delta=settings.delta)
        self._taking = threading.Lock()
        """Held while a snapshot is taken or offered to servers."""
        self._news = News(announce)
        self._misses: deque[Miss] = deque()
        self._attestor = None
        if settings.probe_tolerance is not None:
            self._attestor = Attestor(
                secret=settings.secret,
                tolerance=settings.probe_tolerance,
                timeout_s=settings.timeout_s,
                report=lambda miss: self._loop.call(lambda: self._take_miss(miss)),
            )
        self._roster = Roster(
            servers, secret=settings.secret, attestor=self._attestor, changed=lambda: self._loop.wake()
        )
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="weight-work")
        self._loop = Supervision(self._bring_up_to_date, self._roster.close)
        self._loop.start()

    # The training thread

    def check(self) -> None:
        """Raises the error that ended the updates, if any.

        Raises:
            ServersExpelledError: no server is left.
        """
        self._loop.check()

    @property
    def stats(self) -> PushStats:
        """The live version and the cost of its update."""
        return self._news.stats

    @property
    def is_busy(self) -> bool:
        """Whether servers that keep up are still pulling the newest version, which ``send`` would interrupt."""
        newest = self._snapshots.newest
        return newest is not None and newest.offer.is_open(self._settings.stall_s)

    @property
    def outcomes(self) -> dict[str, UpdateOutcome]:
        """Result of the last update of each server."""
        return {member.name: member.last for member in self._roster if member.last is not None}

    @property
    def wants_scores(self) -> bool:
        """Whether the next version's log-probabilities should be compared."""
        return self._attestor is not None and self._attestor.wants_scores

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None:
        """Samples a text for the probe from the first server that answers. None if none answers in ``timeout_s``."""
        assert self._attestor is not None, "servers are not asked for proof"
        deadline = time.monotonic() + timeout_s
        while (text := self._attestor.sample(shape, vocab_size, seed)) is None and time.monotonic() < deadline:
            time.sleep(SAMPLE_POLL_S)
        return text

    def attest_with(self, text: ProbeText) -> None:
        """Starts calibrating servers on this text. A calibrated server counts as up."""
        if self._attestor is not None:
            self._attestor.begin(text)

    def wait_for_servers(self, count: int, timeout_s: float) -> int:
        """Waits for ``count`` servers that may be sent weights, at most ``timeout_s``. Returns their number."""
        return self._loop.wait(lambda: sum(member.is_up for member in self._roster), count, timeout_s)

    def send(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        specs: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
    ) -> None:
        """Takes a snapshot, which servers pull in the background. Servers still pulling the oldest one are interrupted.

        Args:
            version: number of optimizer steps that made these weights.
            params: full tensors under the checkpoint's names, in the order of ``specs``. They are consumed one by one,
                so a sharded trainer may gather each on demand.
            specs: every parameter's name, dtype and full shape.
            scores: the trainer's future log-probabilities of the probe's text with these weights. None = they are not
                compared for this version.
        """
        self.check()
        with self._taking:
            snapshot = self._snapshots.take(version, params, Layout(tuple(specs)))
            if self._attestor is not None:
                snapshot.checksum = self._pool.submit(checksum, snapshot.buffer)
                self._attestor.expect(version, Expected(snapshot.checksum, scores))
        self._loop.wake()

    def wait_live(self, version: int, timeout_s: float, count: int = 1) -> bool:
        """Waits until ``count`` servers serve ``version`` or newer. Returns False after ``timeout_s``."""
        return self._loop.wait(lambda: self._news.count_live(version), count, timeout_s) >= count

    def close(self) -> None:
        """Ends all updates and connections."""
        self._loop.close()
        if self._attestor is not None:
            self._attestor.close()
        self.giver.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # The supervising loop

    async def _bring_up_to_date(self) -> None:
        """Updates members, offers and announcements after any event."""
        await self._roster.follow()
        if self._taking.acquire(blocking=False):  # else ``send`` wakes the loop when it has the snapshot
            try:
                await self._offer_newest()
            finally:
                self._taking.release()
        await asyncio.to_thread(self._tell)

    async def _offer_newest(self) -> None:
        """Starts the updates of all ready servers that lack the newest version."""
        snapshot = self._snapshots.newest
        if snapshot is None:
            return
        if snapshot.base is not None:
            self._snapshots.offer_delta(snapshot, await asyncio.to_thread(encode_delta, snapshot.base, snapshot.buffer))
        ready = [m for m in self._roster if m.is_up and m.update is None and m.serves != snapshot.version]
        if snapshot.offer.is_new:
            snapshot.offer.start(member.name for member in ready)
            dispatches = chained(snapshot, ready, self.giver.address, self._settings.bucket_bytes)
        else:
            holders = [m for m in self._roster if m.serves == snapshot.version and not m.is_suspect]
            dispatches = joining(snapshot, ready, holders, self.giver.address, self._settings.bucket_bytes)
        for dispatch in dispatches:
            self._start(snapshot, dispatch)

    def _start(self, snapshot: Snapshot, dispatch: Dispatch) -> None:
        member, num_bytes = dispatch.member, dispatch.num_bytes
        request = WeightUpdateRequest(
            sender=self._snapshots.sender,
            version=snapshot.version,
            params=snapshot.layout.specs,
            workers=dispatch.route,
            carriage=self._settings.carriage,
            bucket_bytes=dispatch.bucket_bytes,
            timeout_s=RECEIVE_SHARE * self._settings.timeout_s,
            stall_s=self._settings.stall_s,
            expected_s=expected_s(num_bytes, self.outcomes.values()),
            base_version=dispatch.base_version,
        )
        member.held = None
        snapshot.users.add(member.name)
        member.update = asyncio.create_task(self._update(member, snapshot, request, num_bytes))

    async def _update(self, member: Member, snapshot: Snapshot, request: WeightUpdateRequest, num_bytes: int) -> None:
        """Runs one server's update, after which the server serves the version or is out of service."""
        started, answer, reason = time.monotonic(), None, ""
        try:
            answer = await member.post(request)
        except WeightUpdateError as error:
            reason = str(error)
        seconds = time.monotonic() - started
        outcome = UpdateOutcome(
            version=request.version, num_bytes=num_bytes, seconds=seconds, answer=answer, error=reason
        )
        member.take(outcome, is_late=snapshot.offer.is_late(self._settings.stall_s))
        snapshot.users.discard(member.name)
        snapshot.offer.end(member.name, is_served=answer is not None)
        if answer is not None and self._attestor is not None:
            self._attestor.took(member.name, request.version)
        self._loop.wake()

    def _take_miss(self, miss: Miss) -> None:
        """Takes the server out of service. It gets the whole version again unless this was its second miss."""
        member = self._roster.get(miss.server)
        if member is not None:
            member.miss(is_final=miss.is_final)
        self._misses.append(miss)
        self._loop.wake()

    def _tell(self) -> None:
        """Announces missed probes, then which server serves which version."""
        members = list(self._roster)
        while self._misses:
            self._news.missed(self._misses.popleft(), members)
        self._news.tell(members)


def _indexed(device: torch.device) -> torch.device:
    """Adds the index to a CUDA device, because communicators compare devices including their index."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
