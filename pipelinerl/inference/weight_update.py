"""The weight update as one transaction of the server.

    receive all bytes in the background → between two steps: swap and label (requests and KV cache stay)

A sender that fails before the swap leaves the old weights untouched. A failed swap leaves undefined weights, so the
server ends.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request, Response

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import (
    CHECK_PATH,
    INFO_PATH,
    PATH,
    STALE,
    Address,
    Failed,
    Link,
    PullUpdate,
    Staged,
    WeightCheck,
    WeightCheckRequest,
    WeightInfo,
    WeightUpdateAnswer,
    WeightUpdateFailure,
    WeightUpdateRequest,
)
from pipelinerl.weights.transfer.wire import Connection, WireError

log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Added to the request's timeout, so that the workers' own deadline fires first and reports the reason."""
PATIENCE_S = 30.0
"""A worker that sends nothing for this long is frozen: it normally sends several signs of life per second."""

_replies: msgspec.json.Decoder[Staged | Failed] = msgspec.json.Decoder(Staged | Failed)
_update_requests, _check_requests = msgspec.json.Decoder(WeightUpdateRequest), msgspec.json.Decoder(WeightCheckRequest)


class ServedEngine(Protocol):
    """The part of vLLM that the transaction uses."""

    async def call_workers(self, method: str, *args: Any) -> list[Any]: ...

    async def swap(self, version: int) -> tuple[float, float]:
        """Makes the staged version live between two steps. Returns the stall and the swap's part of it in milliseconds.

        Raises:
            SwapFailedError: the weights are undefined, and no step follows.
        """
        ...

    async def version(self) -> str: ...


class SwapFailedError(WeightUpdateError):
    """A swap began and did not end."""


class UpdateFailed(WeightUpdateError):
    """The update failed and the old weights stay live.

    ``status`` is the HTTP status of the answer, ``links`` is what the workers that failed saw of their sources.
    """

    def __init__(self, message: str, status: int, links: Sequence[Link] = ()):
        super().__init__(message)
        self.status, self.links = status, tuple(links)


class UpdateControl:
    """Runs one update at a time. A newer request supersedes one that is still receiving.

    Args:
        workers: addresses of the engine's workers.
        on_fatal: ends this server.
        announce: called when ``info`` has changed.
    """

    def __init__(
        self,
        engine: ServedEngine,
        *,
        workers: Sequence[Address],
        secret: str,
        on_fatal: Callable[[], None],
        announce: Callable[[WeightInfo], None] = lambda info: None,
    ):
        self._engine, self._on_fatal, self._announce = engine, on_fatal, announce
        self._serving = self._reading = ""
        self._workers, self._secret = tuple(workers), secret
        self._turn = asyncio.Lock()
        self._newest = 0
        self._pool = ThreadPoolExecutor(len(workers), thread_name_prefix="weight-handover")

    @property
    def workers(self) -> tuple[Address, ...]:
        return self._workers

    async def update(
        self, requests: Sequence[WeightUpdateRequest], is_abandoned: Callable[[], Awaitable[bool]] | None = None
    ) -> WeightUpdateAnswer:
        """Runs one update: stages the requests one after the other, each the base of the next, and swaps in the last.

        Args:
            is_abandoned: tells whether the sender has hung up. None = there is none.
        Raises:
            UpdateFailed: the old weights are live and exact.
        """
        request = requests[-1]
        if len(request.workers) != len(self._workers):
            raise UpdateFailed(
                f"workers has {len(request.workers)} entries, this server has {len(self._workers)} workers", 422
            )
        self._newest += 1
        turn = self._newest
        async with self._turn:
            staged = [await self._receive(one, turn, is_abandoned) for one in requests][-1]
            pause_ms, swap_ms = await self._swap(request.version)
            self._serving = request.whole_key
        answer = WeightUpdateAnswer(
            version=request.version,
            pause_ms=pause_ms,
            swap_ms=swap_ms,
            transfer_ms=max(worker.transfer_ms for worker in staged),
            prepare_ms=max(worker.prepare_ms for worker in staged),
            staged_bytes=max(worker.staged_bytes for worker in staged),
            links=tuple(link for worker in staged for link in worker.links),
        )
        log.info(
            "event=weights_live version=%d pause_ms=%.1f swap_ms=%.1f transfer_ms=%.1f prepare_ms=%.1f staged_bytes=%d",
            *(answer.version, pause_ms, swap_ms, answer.transfer_ms, answer.prepare_ms, answer.staged_bytes),
        )
        return answer

    async def _receive(
        self, request: WeightUpdateRequest, turn: int, is_abandoned: Callable[[], Awaitable[bool]] | None
    ) -> list[Staged]:
        """Waits until all workers have staged. Fails at a worker's error, deadline, newer request or hang-up."""
        deadline = time.monotonic() + request.timeout_s + GRACE_S
        loop, handovers = asyncio.get_running_loop(), [Handover(address, self._secret) for address in self._workers]
        waits = [loop.run_in_executor(self._pool, handover.run, request) for handover in handovers]
        try:
            pending = set(waits)
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                errors = [error for wait in done if (error := wait.exception()) is not None]
                if errors:
                    links = [link for error in errors if isinstance(error, TransferError) for link in error.links]
                    raise _failed(f"transfer failed: {errors[0]}", 409 if STALE in str(errors[0]) else 424, links)
                if turn != self._newest:
                    raise _failed("superseded by a newer update", 409)
                if is_abandoned is not None and await is_abandoned():
                    raise _failed("the sender hung up", 499)
                if time.monotonic() > deadline:
                    raise _failed(f"not all bytes came within {request.timeout_s:g} s", 408)
            return [wait.result() for wait in waits]
        finally:
            for handover in handovers:
                handover.give_up()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _swap(self, version: int) -> tuple[float, float]:
        try:
            return await self._engine.swap(version)
        except SwapFailedError as error:
            log.critical("event=swap_failed version=%d reason=%s: undefined weights, this server ends", version, error)
            self._on_fatal()
            raise

    async def check(self, version: int) -> WeightCheck:
        """Compares the live tensors with the bytes of ``version`` on all workers."""
        poll_s = 0.002  # of a small model it takes milliseconds, of a large one seconds
        while None in (results := await self._engine.call_workers("weight_check", version)):
            await asyncio.sleep(poll_s)
            poll_s = min(1.5 * poll_s, 0.05)
        return combined(msgspec.convert(results, list[WeightCheck]))

    async def info(self) -> WeightInfo:
        version = await self._engine.version()
        return WeightInfo(weight_version=version, workers=self._workers, serving=self._serving, reading=self._reading)

    async def begin_reading(self, key: str) -> None:
        """Reports which version is being fetched from a store. Empty = none."""
        self._reading = key
        self._announce(await self.info())


class TransferError(WireError):
    """A worker's transfer failed. ``links``: what the worker saw of its sources."""

    def __init__(self, failed: Failed):
        super().__init__(failed.error)
        self.links = failed.links


class Handover:
    """The order to one worker to pull an update, over a connection of its own: neither engine nor decoding is involved.

    Hanging up abandons the update.
    """

    def __init__(self, address: Address, secret: str):
        self._address, self._secret = address, secret
        self._connection: Connection | None = None
        self._is_given_up = False

    def run(self, request: WeightUpdateRequest) -> Staged:
        """Blocks until the update is staged.

        Raises:
            TransferError: the transfer failed.
            WireError: the worker is gone or frozen, or ``give_up`` was called.
        """
        self._connection = connection = Connection.dial(self._address, self._secret, PATIENCE_S)
        try:
            if self._is_given_up:
                raise WireError("given up")
            reply: Staged | Failed = connection.ask(PullUpdate(request=request), _replies)
        finally:
            connection.close()
        if isinstance(reply, Failed):
            raise TransferError(reply)
        return reply

    def give_up(self) -> None:
        """Abandons the update. Any thread may call it."""
        self._is_given_up = True
        if self._connection is not None:
            self._connection.interrupt()


def _failed(reason: str, status: int, links: Sequence[Link] = ()) -> UpdateFailed:
    log.warning("event=weight_update_failed status=%d reason=%s", status, reason)
    return UpdateFailed(reason, status, links)


def combined(checks: Sequence[WeightCheck]) -> WeightCheck:
    """Combines the workers' answers. A checksum that is none says that the workers received different bytes."""
    checksums = {check.checksum for check in checks if check.checksum}
    return WeightCheck(
        is_checked=all(check.is_checked for check in checks),
        checksum=" and ".join(sorted(checksums)),
        differing=tuple(sorted({name for check in checks for name in check.differing})),
        unlearned=tuple(sorted({name for check in checks for name in check.unlearned})),
        check_ms=max(check.check_ms for check in checks),
        base=" and ".join(sorted({check.base for check in checks})),
    )


def control_router(updates: UpdateControl | None) -> APIRouter:
    """Returns our routes. ``updates`` None = a frozen server, which takes no weights."""
    router = APIRouter()

    @router.get(INFO_PATH)
    async def weight_info() -> Response:
        info = WeightInfo(weight_version="frozen") if updates is None else await updates.info()
        return _json(200, msgspec.to_builtins(info))

    @router.post(PATH)
    async def receive_weight_update(raw: Request) -> Response:
        if updates is None:
            return _json(409, {"error": "this server's weights are frozen"})
        try:
            request = _update_requests.decode(await raw.body())
        except ValueError as error:
            return _json(422, {"error": f"not a weight update request: {error}"})
        # Not cancelled with the connection: a hang-up is seen by polling, and a swap that began always ends.
        try:
            return _json(200, msgspec.to_builtins(await asyncio.shield(updates.update([request], raw.is_disconnected))))
        except UpdateFailed as error:
            return _json(error.status, msgspec.to_builtins(WeightUpdateFailure(error=str(error), links=error.links)))

    @router.post(CHECK_PATH)
    async def check_weights(raw: Request) -> Response:
        if updates is None:
            return _json(409, {"error": "this server's weights are frozen"})
        try:
            request = _check_requests.decode(await raw.body())
        except ValueError as error:
            return _json(422, {"error": f"not a weight check request: {error}"})
        return _json(200, msgspec.to_builtins(await updates.check(request.version)))

    return router


def _json(status: int, content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
