"""How a version comes to the servers: each pulls it from the trainer (`Pushing`), or fetches it from a store."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from pipelinerl.errors import WeightUpdateError
from pipelinerl.observability import spans
from pipelinerl.weights.attestor import Attestor
from pipelinerl.weights.dispatch import Dispatch, chained, expected_s, joining
from pipelinerl.weights.member import Member, UpdateOutcome
from pipelinerl.weights.offer import Offer
from pipelinerl.weights.origin import SenderSettings
from pipelinerl.weights.plan import DeltaChoice
from pipelinerl.weights.protocol import WeightUpdateAnswer, WeightUpdateRequest
from pipelinerl.weights.ranks import Ranks
from pipelinerl.weights.roster import Roster

RECEIVE_SHARE = 0.9
"""Share of the timeout in which all bytes must arrive, so that the server's own error comes before ours."""


class Delivery(Protocol):
    """Used from the sender's loop, except for ``wants_delta``."""

    async def deliver(self, offer: Offer, roster: Roster) -> None:
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
        attestor: Attestor | None,
        *,
        sender: str,
        wake: Callable[[], object],
    ):
        self._ranks, self._settings, self._attestor = ranks, settings, attestor
        self._sender, self._wake = sender, wake
        self._delta = DeltaChoice(settings.delta)

    def wants_delta(self) -> bool:
        return self._delta.next()

    def missed(self) -> None:
        """Does nothing: a member out of service is sent the whole version anyway."""

    async def close(self) -> None:
        """Does nothing: updates end with their members."""

    async def deliver(self, offer: Offer, roster: Roster) -> None:
        if offer.is_new and offer.base_version is not None:
            assert offer.descriptions is not None
            described = await asyncio.wrap_future(offer.descriptions)
            offer.take_deltas(described)
        ready = [m for m in roster if m.is_up and m.update is None and m.serves != offer.version]
        if offer.is_new:
            offer.start(member.name for member in ready)
            dispatches = chained(offer, ready, self._ranks.addresses, self._settings.bucket_bytes)
        else:
            holders = [m for m in roster if m.serves == offer.version and not m.is_suspect]
            dispatches = joining(offer, ready, holders, self._ranks.addresses, self._settings.bucket_bytes)
        before = [m.last for m in roster if m.last is not None]
        for dispatch in dispatches:
            self._start(offer, dispatch, before)

    def _start(self, offer: Offer, dispatch: Dispatch, before: Sequence[UpdateOutcome]) -> None:
        member, num_bytes = dispatch.member, dispatch.num_bytes
        request = WeightUpdateRequest(
            sender=self._sender,
            version=offer.version,
            params=offer.layout.specs,
            workers=dispatch.route,
            carriage=self._settings.carriage,
            bucket_bytes=dispatch.bucket_bytes,
            timeout_s=RECEIVE_SHARE * self._settings.timeout_s,
            stall_s=self._settings.stall_s,
            expected_s=expected_s(num_bytes, before),
            base_version=dispatch.base_version,
        )
        member.held = None
        offer.users.add(member.name)
        member.update = asyncio.create_task(self._update(member, offer, request, num_bytes))

    async def _update(self, member: Member, offer: Offer, request: WeightUpdateRequest, num_bytes: int) -> None:
        """Runs one server's update, after which the server serves the version or is out of service."""
        started, began, answer, reason = time.monotonic(), time.time_ns(), None, ""
        try:
            answer = await member.post(request)
        except WeightUpdateError as error:
            reason = str(error)
        seconds = time.monotonic() - started
        record_update(member.name, request.version, began, answer, num_bytes)
        outcome = UpdateOutcome(
            version=request.version, num_bytes=num_bytes, seconds=seconds, answer=answer, error=reason
        )
        member.take(outcome, is_late=offer.is_late(self._settings.stall_s))
        offer.end(member.name, is_served=answer is not None)
        if answer is not None:
            transfer_s = 1e-3 * answer.transfer_ms
            self._delta.measured(transfer_s + offer.encode_s, is_delta=request.base_version is not None)
        if answer is not None and self._attestor is not None:
            self._attestor.took(member.name, request.version)
        self._wake()


def record_update(server: str, version: int, began: int, answer: WeightUpdateAnswer | None, num_bytes: int) -> None:
    """Record a server's update as spans. The server says how long its parts took, so only this host's clock counts."""
    trace, ended = f"version {version}", time.time_ns()
    if answer is None:
        spans.record("transfer", trace, began, ended, server=server, failed=True)
        return
    spans.record("transfer", trace, began, began + int(1e6 * answer.transfer_ms), server=server, bytes=num_bytes)
    spans.record("swap", trace, ended - int(1e6 * answer.pause_ms), ended, server=server, version=version)
