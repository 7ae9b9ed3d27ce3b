"""How a version comes to the servers: each pulls it from the trainer (`Pushing`), or fetches it from a store."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipelinerl.errors import WeightUpdateError
from pipelinerl.observability import spans
from pipelinerl.weights.protocol import HELD_UP, OWN_LINK, Link, WeightUpdateAnswer, WeightUpdateRequest
from pipelinerl.weights.publish.dispatch import chained, in_order, late
from pipelinerl.weights.publish.links import SLOW, LinkTable, Server
from pipelinerl.weights.publish.nccl_groups import NcclGroups, planned_groups
from pipelinerl.weights.publish.origin import SenderSettings
from pipelinerl.weights.publish.ranks import Ranks
from pipelinerl.weights.publish.servers import FailedPullError, ServerClient, ServerPool, UpdateOutcome
from pipelinerl.weights.publish.versions import DeltaChoice, Dispatch, PendingVersion
from pipelinerl.world.network import interface_of

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

    @property
    def failed_groups(self) -> Mapping[str, int]:
        """NCCL groups that failed, by the interface through which their bytes came over TCP instead."""
        ...


class Pushing:
    """Has servers pull the version: all that are ready when it comes in one chain, others from those that have it."""

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
        self._delta = DeltaChoice(settings.weights.delta)
        self.links = LinkTable()
        self._groups = None
        if settings.transport == "nccl":
            self._groups = NcclGroups(ranks.nccl, sender, settings.secret, settings.weights.stall_s)

    def wants_delta(self) -> bool:
        return self._delta.next()

    def missed(self) -> None:
        """Does nothing: a member out of service is sent the whole version anyway."""

    @property
    def failed_groups(self) -> Mapping[str, int]:
        if self._groups is None or not self._groups.failed:
            return {}
        return {interface_of(host := self._ranks.addresses[0].host) or host: self._groups.failed}

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
            self.links.plan({one.name: one.node for one in pool if one.workers}, heads=len(pending.stripes))
            pending.start((client.name for client in ready), self.links.update)
            ready = [m for m in in_order(pool, self.links.turn) if m in ready]
            dispatches = chained(pending, ready, self.links, self._ranks.addresses, self._settings.bucket_bytes)
            if self._groups is not None and dispatches:
                await asyncio.to_thread(self._groups.bring, planned_groups(dispatches, self._ranks.addresses))
        else:
            holders = [m for m in pool if m.serves == pending.version and not m.is_suspect]
            patience_s = SLOW * self.links.expected_s(pending.layout.num_bytes) + self._settings.weights.stall_s
            dispatches = late(
                pending,
                ready,
                holders,
                self.links,
                self._ranks.addresses,
                self._settings.bucket_bytes,
                is_overdue=pending.offered_s > patience_s,
            )
        for dispatch in dispatches:
            self._start(pending, dispatch, pool)

    def _start(self, pending: PendingVersion, dispatch: Dispatch, pool: ServerPool) -> None:
        client = dispatch.client
        request = WeightUpdateRequest(
            sender=self._sender,
            version=pending.version,
            params=pending.layout.specs,
            workers=dispatch.route,
            transport=self._settings.transport,
            bucket_bytes=dispatch.bucket_bytes,
            timeout_s=RECEIVE_SHARE * self._settings.weights.timeout_s,
            stall_s=self._settings.weights.stall_s,
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
        seen: Sequence[Link] = ()
        try:
            answer = await client.post(request, self._settings.weights.timeout_s)
            seen = answer.links
        except WeightUpdateError as error:
            reason = str(error)
            seen = error.links if isinstance(error, FailedPullError) else ()
        except Exception as error:  # noqa: BLE001 — the task's boundary: an update without an end is the server's last
            reason = f"{client.name} at {client.job.url}: {type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        record_update(client.name, request.version, began, answer, num_bytes)
        owners = {address: _server(one) for one in pool for address in one.workers}
        self.links.record(
            pending.update, _server(client), seen, owners, dispatch.givers, is_chained=dispatch.is_chained
        )
        outcome = UpdateOutcome(
            version=request.version,
            num_bytes=num_bytes,
            seconds=seconds,
            answer=answer,
            error=reason,
            is_held_up=bool(reason) and not self._is_own_fault(dispatch, pending, reason),
        )
        client.record_outcome(outcome)
        pending.end(client.name, is_served=answer is not None)
        if answer is not None:
            is_delta = request.base_version is not None
            if dispatch.is_chained and is_delta == (pending.deltas is not None):
                self._delta.measured(pending.version, 1e-3 * answer.transfer_ms + pending.encode_s, is_delta=is_delta)
            if is_delta:
                pending.took_delta.add(client.name)
            if checker := pool.checker_of(client):
                checker.start_check(client.name, request.version)
        self._wake()

    def _is_own_fault(self, dispatch: Dispatch, pending: PendingVersion, reason: str) -> bool:
        """Whether a pull failed by the server's own link. In a chain the one before it may be slow to send."""
        if HELD_UP in reason or OWN_LINK not in reason:
            return HELD_UP not in reason
        if dispatch.is_chained:
            return dispatch.givers <= set(self._ranks.addresses)
        return self.links.had_slow_downlink(pending.update, _server(dispatch.client))


def _server(client: ServerClient) -> Server:
    return Server(client.name, client.node)


def record_update(server: str, version: int, began: int, answer: WeightUpdateAnswer | None, num_bytes: int) -> None:
    """Record a server's update as spans. The server says how long its parts took, so only this host's clock counts."""
    trace, ended = f"version {version}", time.time_ns()
    if answer is None:
        spans.record("transfer", trace, began, ended, server=server, failed=True)
        return
    spans.record("transfer", trace, began, began + int(1e6 * answer.transfer_ms), server=server, bytes=num_bytes)
    spans.record("swap", trace, ended - int(1e6 * answer.pause_ms), ended, server=server, version=version)
