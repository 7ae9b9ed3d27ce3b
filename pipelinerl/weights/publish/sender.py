"""The trainer's end: takes a snapshot of the weights, has it delivered, announces which server serves which version.

Consumes: versions from the training loop, the provider's servers, their answers, missed probes. Produces: updates of
servers, and on topic `trainer` a `WeightUpdateSuccess` whenever a server changes its version, `ProbePassed` whenever
one has been verified with it. Waits for: servers, each in its own coroutine with a deadline. Ends: at ``close`` or with
the first error, which the training loop sees at its next call.
"""

import asyncio
import copy
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import torch

from pipelinerl.records import CalibrationExceeded, ProbeMissed
from pipelinerl.weights.protocol import Address, ParamSpec, WeightInfo
from pipelinerl.weights.publish.announcements import Announcement, Announcements, PushStats
from pipelinerl.weights.publish.delivery import Delivery, Pushing
from pipelinerl.weights.publish.origin import Origin, SenderSettings, model_stripes
from pipelinerl.weights.publish.ranks import Ranks
from pipelinerl.weights.publish.servers import Fetching, ServerClient, ServerPool, UpdateOutcome
from pipelinerl.weights.publish.store_delivery import Publishing
from pipelinerl.weights.publish.supervision import Supervision
from pipelinerl.weights.publish.versions import PendingVersion, SnapshotPlan
from pipelinerl.weights.verify.checker import Expected, WeightChecker
from pipelinerl.weights.verify.probe import ProbeText
from pipelinerl.world import Job


class WeightSender:
    """Sends weights to the servers. Only the trainer's rank 0 uses it.

    Args:
        servers: returns the current servers of the policy, and of teachers that follow it. Called often.
        announce: writes a message to topic `trainer`. Called from one thread.
        origin: rank 0's own end. None = this process is the only rank.
        others: addresses of the origins of ranks 1, 2, ….
        reports: with a store, what each server says about itself. None = they are asked over HTTP.

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
        origin: Origin | None = None,
        others: Sequence[Address] = (),
        reports: Callable[[], Mapping[str, WeightInfo]] | None = None,
    ):
        self._settings = settings
        self.origin = origin or Origin(settings, sender=uuid.uuid4().hex)
        self._ranks = Ranks(self.origin, others, settings)
        self._pending_version: PendingVersion | None = None
        self._older: PendingVersion | None = None
        """The offer before it."""
        self._taking = threading.Lock()
        """Held while a snapshot is taken or offered to servers."""
        self._announcements = Announcements(announce)
        self._misses: list[ProbeMissed] = []
        self._exceeded: deque[CalibrationExceeded] = deque()
        self._checker = None
        if settings.probe_tolerance is not None:
            self._checker = WeightChecker(
                secret=settings.secret,
                tolerance=settings.probe_tolerance,
                timeout_s=settings.weights.timeout_s,
                report=lambda miss: self._loop.call(lambda: self._queue_miss(miss)),
                passed=lambda: self._loop.wake(),
                base=settings.base,
                exceeded=self._queue_exceeded,
            )
        self._pool = ServerPool(
            servers,
            secret=settings.secret,
            checker=self._checker,
            changed=lambda: self._loop.wake(),
            fetching=None if settings.store is None else Fetching(self.origin.sender, reports),
        )
        deliver: type[Pushing | Publishing] = Pushing if settings.store is None else Publishing
        self._delivery: Delivery = deliver(
            self._ranks, settings, sender=self.origin.sender, wake=lambda: self._loop.wake()
        )
        self._loop = Supervision(self._bring_up_to_date, self._end)
        self._loop.start()

    # The training thread

    def check(self) -> None:
        """Raises the error that ended the updates, if any.

        Raises:
            ServersExpelledError: no server is left.
            WeightUpdateError: every server refuses updates, or another error.
        """
        self._loop.check()

    @property
    def stats(self) -> PushStats:
        """The live version and the cost of its update."""
        noise = None if self._checker is None else self._checker.noise
        return replace(self._announcements.stats, failed_groups=self._delivery.failed_groups, noise=noise)

    @property
    def is_busy(self) -> bool:
        """Whether servers that keep up are still pulling the newest version, which ``send`` would interrupt."""
        return self._pending_version is not None and self._pending_version.is_open(self._settings.weights.stall_s)

    def plan(self) -> SnapshotPlan:
        """Decides for all ranks how they take the next version."""
        pulled = (
            pending.version for pending in (self._pending_version, self._older) if pending is not None and pending.pulls
        )
        return SnapshotPlan(kept=next(pulled, None), is_delta=self._delivery.wants_delta())

    @property
    def outcomes(self) -> dict[str, UpdateOutcome]:
        """Result of the last update of each server."""
        return {client.name: client.last for client in self._pool if client.last is not None}

    def wants_scores(self, *, is_idle: bool) -> bool:
        """Whether the next version's log-probabilities should be compared. ``is_idle``: the trainer waits anyway."""
        return self._checker is not None and self._checker.wants_scores(is_idle=is_idle)

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None:
        """Samples a text for the probe from the first server that answers. None if it is not there in ``timeout_s``.

        The next call goes on.
        """
        assert self._checker is not None, "servers are not probed"
        deadline = time.monotonic() + timeout_s
        while (text := self._checker.sample(shape, vocab_size, seed, timeout_s)) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        return text

    def check_with(self, text: ProbeText) -> None:
        """Starts calibrating servers on this text. A calibrated server counts as up."""
        if self._checker is not None:
            self._checker.begin(text)

    @property
    def num_answering(self) -> int:
        """Servers that have answered since they joined."""
        return sum(client.has_answered for client in self._pool)

    def wait_for_servers(self, count: int, timeout_s: float) -> int:
        """Waits for ``count`` servers that may be sent weights, at most ``timeout_s``. Returns their number."""
        return self._loop.wait(lambda: sum(client.is_up for client in self._pool), count, timeout_s)

    def send(
        self,
        version: int,
        params: Iterable[tuple[str, torch.Tensor]],
        specs: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
        plan: SnapshotPlan | None = None,
    ) -> None:
        """Takes rank 0's stripe and has servers pull the version in the background. The other ranks take theirs.

        Servers that still pull another version than ``plan.kept`` are interrupted.

        Args:
            version, params, specs: see ``Origin.take_snapshot``.
            scores: the trainer's future log-probabilities of the probe's text with these weights. None = they are not
                compared for this version.
            plan: what ``plan`` returned for this version. None = this is the only rank.
        """
        self.check()
        plan = plan or self.plan()
        with self._taking:
            snapshot = self.origin.take_snapshot(version, params, specs, plan)
            layout = snapshot.stripe.layout
            stripes = tuple(model_stripes(layout, self.origin.ranks))
            before = (
                pending
                for pending in (self._pending_version, self._older)
                if pending is not None and pending.version == plan.kept
            )
            self._older = next(before, None)
            pending = PendingVersion(version, layout, stripes, snapshot.base_version)
            if plan.is_delta or self._checker is not None or self._settings.store is not None:
                pending.descriptions = self._ranks.describe(version, len(stripes))
                if self._checker is not None:
                    self._checker.expect(version, Expected(self._ranks.checksum(pending.descriptions), scores))
            self._pending_version = pending
        self._loop.wake()

    def wait_live(self, version: int, timeout_s: float, count: int = 1) -> bool:
        """Waits until ``count`` servers serve ``version`` or newer. Returns False after ``timeout_s``."""
        return self._loop.wait(lambda: self._announcements.count_live(version), count, timeout_s) >= count

    def close(self) -> None:
        """Ends all updates and connections."""
        self._loop.close()
        if self._checker is not None:
            self._checker.close()
        self.origin.close()
        self._ranks.close()

    # The supervising loop

    async def _bring_up_to_date(self) -> None:
        """Updates members, offers and announcements after any event."""
        await self._pool.follow()
        self._pool.check_refusals(self._settings.patience_s)
        if self._taking.acquire(blocking=False):  # else ``send`` wakes the loop when it has the snapshot
            try:
                if self._pending_version is not None:
                    await self._delivery.deliver(self._pending_version, self._pool)
            finally:
                self._taking.release()
        await self._announce()

    async def _end(self) -> None:
        await self._delivery.close()
        await self._pool.close()

    def _queue_miss(self, miss: ProbeMissed) -> None:
        """Takes the server out of service. It gets the whole version again unless this was its second miss."""
        client = self._pool.get(miss.server)
        if client is not None:
            client.miss(is_final=miss.is_final)
            self._pool.refuse(client.name)
            self._delivery.missed()
        self._misses.append(miss)
        self._loop.wake()

    def _queue_exceeded(self, message: CalibrationExceeded) -> None:
        """Has it announced with the next message. Called from any thread."""
        self._exceeded.append(message)
        self._loop.wake()

    async def _announce(self) -> None:
        """Announces missed probes, then which server serves which version and which are verified."""
        # Read in one turn of the loop: a server that leaves service for its miss is never told before the miss.
        misses, self._misses = self._misses, []
        clients = [copy.copy(client) for client in self._pool if client.is_policy]
        verified = {} if self._checker is None else self._checker.verified
        await asyncio.to_thread(self._write_announcement, misses, clients, verified)

    def _write_announcement(
        self, misses: Sequence[ProbeMissed], clients: Sequence[ServerClient], verified: Mapping[str, int]
    ) -> None:
        while self._exceeded:
            self._announcements.exceeded(self._exceeded.popleft())
        for miss in misses:
            self._announcements.missed(miss, clients)
        self._announcements.announce(clients, verified)
