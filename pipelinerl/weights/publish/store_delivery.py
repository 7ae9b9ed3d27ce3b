"""Publishes versions in a store. Servers fetch them by themselves and report what they serve.

Consumes: versions that the ranks have taken, reports of servers. Produces: files, a manifest. Waits for: ranks that
write, in a task of its own. Ends: after `weights.timeout_s` without success or answer, with the reason.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from typing import TypeVar

from pipelinerl.errors import WeightUpdateError
from pipelinerl.observability import spans
from pipelinerl.weights.protocol import PayloadRange, Write
from pipelinerl.weights.publish.origin import SenderSettings
from pipelinerl.weights.publish.ranks import Ranks
from pipelinerl.weights.publish.servers import ServerPool, UpdateOutcome
from pipelinerl.weights.publish.versions import PendingVersion
from pipelinerl.weights.store.files import open_files
from pipelinerl.weights.store.manifest import StoreError
from pipelinerl.weights.store.publisher import Publisher

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause after a version that could not be published."""

T = TypeVar("T")


class Publishing:
    """The `pipelinerl.weights.publish.delivery.Delivery` to a store.

    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(self, ranks: Ranks, settings: SenderSettings, *, sender: str, wake: Callable[[], object]):
        assert settings.store is not None
        self._ranks, self._settings, self._wake = ranks, settings, wake
        self._publisher = Publisher(
            open_files(settings.store),
            secret=settings.secret,
            sender=sender,
            keep=settings.weights.store_keep,
            grace_s=settings.weights.stall_s,
        )
        self._task: asyncio.Task[None] | None = None
        self._failing_since: float | None = None
        self._retry_at = 0.0
        self._is_missed = False
        self._published: tuple[float, int] = (0.0, 0)
        """When the offered version was published, and its bytes."""

    def wants_delta(self) -> bool:
        return bool(self._settings.weights.delta)

    def missed(self) -> None:
        self._is_missed = True

    @property
    def failed_groups(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        """Stops waiting for the version that is being published."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, WeightUpdateError):
                await self._task

    async def deliver(self, pending: PendingVersion, pool: ServerPool) -> None:
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            await task
        if self._is_missed and not pending.is_new:
            pending.reopen()
        if pending.is_new:
            if self._task is None and time.monotonic() >= self._retry_at:
                self._task = asyncio.create_task(self._publish(pending, pool))
            return
        for client in pool:
            if client.serves != pending.version:
                continue
            pending.end(client.name, is_served=True)
            if client.last is None or client.last.version != pending.version:
                seconds = time.monotonic() - self._published[0]
                client.last = UpdateOutcome(version=pending.version, num_bytes=self._published[1], seconds=seconds)

    async def _publish(self, pending: PendingVersion, pool: ServerPool) -> None:
        """Tries to publish the version. The offer stays new if that fails.

        Raises:
            WeightUpdateError: it has failed for too long.
        """
        began, started = time.time_ns(), time.monotonic()
        try:
            num_bytes = await self._write(pending)
        except WeightUpdateError as error:
            self._failed(pending.version, error, started)
            return
        self._failing_since = None
        spans.record("publish", f"version {pending.version}", began, time.time_ns(), bytes=num_bytes)
        self._published = (time.monotonic(), num_bytes)
        pending.start(client.name for client in pool if client.is_up)
        self._wake()
        try:
            await self._within_timeout(lambda: self._publisher.clean(pool.reading))
        except StoreError as error:
            log.warning("event=store_not_cleaned reason=%s", error)

    async def _write(self, pending: PendingVersion) -> int:
        """Has every rank write its stripe, then publishes the version. Returns the number of bytes."""
        assert pending.descriptions is not None
        described = await asyncio.wrap_future(pending.descriptions)
        pending.add_deltas(described)
        publisher, base_version = self._publisher, pending.base_version
        if self._is_missed:
            self._is_missed, base_version = False, None
            publisher.revise()
        if pending.deltas is None or not publisher.extends(pending.version, base_version, pending.deltas):
            base_version = None
        ranges = pending.ranges(base_version)
        order = Write(version=pending.version, prefix=publisher.prefix, is_delta=base_version is not None)
        files = await self._within_timeout(lambda: self._ranks.write(order, len(ranges)))
        publisher.wrote([file.name for file in files])
        stored = tuple(PayloadRange(start=s, end=e, file=file) for (s, e), file in zip(ranges, files, strict=True))
        specs = pending.layout.specs
        await self._within_timeout(lambda: publisher.publish(pending.version, specs, stored, base_version))
        return sum(end - start for start, end in ranges)

    async def _within_timeout(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in a thread of its own, because a store may hang. Then nobody waits for the thread.

        Raises:
            StoreError: it has not ended within `weights.timeout_s`.
        """
        done: Future[T] = Future()

        def run() -> None:
            with contextlib.suppress(InvalidStateError):  # nobody waits any more
                try:
                    result = work()
                except Exception as error:  # noqa: BLE001 — raised where it is waited for
                    done.set_exception(error)
                else:
                    done.set_result(result)

        threading.Thread(target=run, name="weight-store", daemon=True).start()
        timeout_s = self._settings.weights.timeout_s
        try:
            return await asyncio.wait_for(asyncio.wrap_future(done), timeout_s)
        except TimeoutError:
            raise StoreError(f"the store has not answered within {timeout_s:g} s") from None

    def _failed(self, version: int, error: WeightUpdateError, started: float) -> None:
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = started
        self._retry_at = now + RETRY_S
        log.warning("event=version_not_published version=%d reason=%s", version, error)
        if now - self._failing_since >= self._settings.weights.timeout_s:
            timeout = f"weights.timeout_s={self._settings.weights.timeout_s:g} s"
            raise WeightUpdateError(f"version {version} could not be published for {timeout}: {error}") from error
