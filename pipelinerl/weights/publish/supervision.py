"""An event loop in its own thread that runs a step whenever it is woken.

An error ends the loop and is raised in callers of ``check`` and ``wait``.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable

from pipelinerl.errors import ServersExpelledError, WeightUpdateError

log = logging.getLogger(__name__)

TICK_S = 0.25
"""The loop also wakes up by itself after this time."""


class Supervision:
    """Args:
    step: awaited after every wake-up.
    end: awaited at the end, also after an error.
    """

    def __init__(self, step: Callable[[], Awaitable[None]], end: Callable[[], Awaitable[None]]):
        self._step, self._end = step, end
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._woken = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Raises the error that ended the loop, if any."""
        if isinstance(self._error, ServersExpelledError):
            raise self._error
        if self._error is not None:
            raise WeightUpdateError(f"weight updates ended: {self._error}") from self._error

    def wake(self) -> None:
        self.call(self._woken.set)

    def call(self, function: Callable[[], object]) -> None:
        """Calls ``function`` in the loop, which ends if it raises. Any thread may call this."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._guarded, function)

    def notify(self) -> None:
        """Makes the callers of ``wait`` check their count again."""
        with self._changed:
            self._changed.notify_all()

    def wait(self, count: Callable[[], int], wanted: int, timeout_s: float) -> int:
        """Waits until ``count`` reaches ``wanted``, at most ``timeout_s``. Returns the count."""
        with self._changed:
            self._changed.wait_for(lambda: count() >= wanted or self._error is not None, timeout_s)
        self.check()
        return count()

    def close(self) -> None:
        self._is_closed = True
        self.wake()
        self._thread.join()

    def _guarded(self, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:  # noqa: BLE001 — as from the step itself
            self._error = self._error or error
            self._woken.set()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._supervise())
        except Exception as error:  # noqa: BLE001 — handed to whoever asks next
            log.error("event=weight_updates_ended error=%s", error)
            self._error = error
            self.notify()  # now: the end below may fail, too
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self.notify()

    async def _supervise(self) -> None:
        while not self._is_closed:
            if self._error is not None:
                raise self._error
            await self._step()
            self.notify()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), TICK_S)
            self._woken.clear()
