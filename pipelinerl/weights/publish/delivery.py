"""How a version comes to the servers: each pulls it from the trainer (`Pushing`), or fetches it from a store."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipelinerl.errors import WeightUpdateError
from pipelinerl.observability import spans
from pipelinerl.weights.protocol import WeightUpdateAnswer, WeightUpdateRequest
from pipelinerl.weights.publish.dispatch import chained, expected_s, joining
from pipelinerl.weights.publish.gauge import uplink_rate
from pipelinerl.weights.publish.nccl_groups import NcclGroups, planned_groups
from pipelinerl.weights.publish.origin import SenderSettings
from pipelinerl.weights.publish.ranks import Ranks
from pipelinerl.weights.publish.server_client import ServerClient, UpdateOutcome
from pipelinerl.weights.publish.server_pool import ServerPool
from pipelinerl.weights.publish.standing import Report, UsualRate, healthy_s, judge_links
from pipelinerl.weights.publish.versions import DeltaChoice, Dispatch, PendingVersion
from pipelinerl.weights.transfer.wire import WireError

log = logging.getLogger(__name__)

RECEIVE_SHARE = 0.9
"""Share of the timeout in which all bytes must arrive, so that the server's own error comes before ours."""


class Delivery(Protocol):
    """Used from the sender's loop, except for ``wants_delta``."""

    async def deliver(self, pending: PendingVersion, pool: ServerPool) -> None:
        """Does what is due to bring the servers to the offered version. Called after every event."""
        ...

    def wants_delta(self) -> bool:
        """Whether the next version is encoded as a difference."""
        ...

    def missed(self) -> None:
        """A server did not use the version that it took, and must get its bytes again."""
        ...

    async def close(self) -> None: ...


class Pushing:
    """Has servers pull the version: all that are ready when it comes in one chain, others from those that have it.

    Args:
        wake: wakes the sender's loop.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: SenderSettings,
        *,
        sender: str,
        wake: Callable[[], object],
    ):
        self._ranks, self._settings = ranks, settings
        self._sender, self._wake = sender, wake
        self._delta = DeltaChoice(settings.delta)
        self._usual = UsualRate()
        self._groups = None
        if settings.transport == "nccl":
            self._groups = NcclGroups(ranks.nccl, sender, settings.secret, settings.stall_s)

    def wants_delta(self) -> bool:
        return self._delta.next()

    def missed(self) -> None:
        """Does nothing: a member out of service is sent the whole version anyway."""

    async def close(self) -> None:
        """Ends the NCCL groups. Updates end with their members."""
        if self._groups is not None:
            self._groups.close()

    async def deliver(self, pending: PendingVersion, pool: ServerPool) -> None:
        if pending.is_new and pending.base_version is not None:
            assert pending.descriptions is not None
            described = await asyncio.wrap_future(pending.descriptions)
            pending.add_deltas(described)
        ready = [m for m in pool if m.is_up and m.update is None and m.serves != pending.version]
        if pending.is_new:
            pending.start((client.name for client in ready), {client.name: client.standing for client in pool})
            dispatches = chained(pending, ready, self._ranks.addresses, self._settings.bucket_bytes)
            if self._groups is not None and dispatches:
                await asyncio.to_thread(self._groups.bring, planned_groups(dispatches, self._ranks.addresses))
        else:
            holders = [m for m in pool if m.serves == pending.version or m.name in pending.pulls]
            holders = [m for m in holders if not m.is_suspect]
            dispatches = joining(pending, ready, holders, self._ranks.addresses, self._settings.bucket_bytes)
        before = [m.last for m in pool if m.last is not None]
        for dispatch in dispatches:
            self._start(pending, dispatch, before, pool)

    def _start(
        self, pending: PendingVersion, dispatch: Dispatch, before: Sequence[UpdateOutcome], pool: ServerPool
    ) -> None:
        client, num_bytes = dispatch.client, dispatch.num_bytes
        request = WeightUpdateRequest(
            sender=self._sender,
            version=pending.version,
            params=pending.layout.specs,
            workers=dispatch.route,
            transport=self._settings.transport,
            bucket_bytes=dispatch.bucket_bytes,
            timeout_s=RECEIVE_SHARE * self._settings.timeout_s,
            stall_s=self._settings.stall_s,
            expected_s=expected_s(num_bytes, before),
            roams=not client.standing.is_slow,
            base_version=dispatch.base_version,
        )
        client.held = None
        pending.pulls[client.name] = dispatch
        client.update = asyncio.create_task(self._update(dispatch, pending, request, pool))

    async def _update(
        self, dispatch: Dispatch, pending: PendingVersion, request: WeightUpdateRequest, pool: ServerPool
    ) -> None:
        """Runs one server's update, after which the server serves the version or is out of service."""
        client, num_bytes = dispatch.client, dispatch.num_bytes
        started, began, answer, reason = time.monotonic(), time.time_ns(), None, ""
        try:
            answer = await client.post(request, self._settings.timeout_s)
        except WeightUpdateError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 — the task's boundary: an update without an end is the server's last
            reason = f"{client.name} at {client.job.url}: {type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        record_update(client.name, request.version, began, answer, num_bytes)
        outcome = UpdateOutcome(
            version=request.version, num_bytes=num_bytes, seconds=seconds, answer=answer, error=reason
        )
        client.record_outcome(outcome)
        pending.end(client.name, is_served=answer is not None)
        if answer is not None:
            transfer_s = 1e-3 * answer.transfer_ms
            is_delta = request.base_version is not None
            if dispatch.is_chained and is_delta == (pending.deltas is not None):
                self._delta.measured(pending.version, transfer_s + pending.encode_s, is_delta=is_delta)
            if dispatch.is_chained:
                reports = pending.reports.setdefault(request.base_version, [])
                reports.append(Report(server=client.name, seconds=transfer_s, links=answer.links))
                self._usual.record(request.version, num_bytes, reports)
                self._judge(reports, pending, pool, self._usual.seconds(num_bytes))
            size = answer.staged_bytes if request.base_version is None else num_bytes
            self._measure_uplink(client, request.version, size, pending.reports.get(request.base_version, []))
            if checker := pool.checker_of(client):
                checker.start_check(client.name, request.version)
        self._wake()

    def _judge(self, reports: Sequence[Report], pending: PendingVersion, pool: ServerPool, usual_s: float) -> None:
        """Takes the verdict over a chain, which may change with every report."""
        servers = {address: client.name for client in pool for address in client.workers}
        verdict = judge_links(reports, servers, pending.standings, usual_s)
        for client in pool:
            client.standing.judge(client.name, pending.version, verdict)

    def _measure_uplink(self, client: ServerClient, version: int, num_bytes: int, reports: Sequence[Report]) -> None:
        """Has the uplink of a server measured from which nobody pulls any more, beside everything else.

        Args:
            version: of the update of the reports.
            num_bytes: that a worker of it would have to send in such an update.
        """
        is_running = client.gauge is not None and not client.gauge.done()
        if client.standing.gives_slowly and reports and not is_running:
            client.gauge = asyncio.create_task(self._gauge(client, version, num_bytes, healthy_s(reports)))

    async def _gauge(self, client: ServerClient, version: int, num_bytes: int, seconds: float) -> None:
        try:
            rates = [await asyncio.to_thread(uplink_rate, worker, self._settings.secret) for worker in client.workers]
        except WireError as error:
            log.info("event=uplink_not_measured server=%s error=%s", client.name, error)
            return
        client.standing.gauge(client.name, version, num_bytes / min(rates), seconds)


def record_update(server: str, version: int, began: int, answer: WeightUpdateAnswer | None, num_bytes: int) -> None:
    """Record a server's update as spans. The server says how long its parts took, so only this host's clock counts."""
    trace, ended = f"version {version}", time.time_ns()
    if answer is None:
        spans.record("transfer", trace, began, ended, server=server, failed=True)
        return
    spans.record("transfer", trace, began, began + int(1e6 * answer.transfer_ms), server=server, bytes=num_bytes)
    spans.record("swap", trace, ended - int(1e6 * answer.pause_ms), ended, server=server, version=version)
