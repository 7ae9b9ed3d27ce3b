"""Runs users' synchronous code in a new thread per call, never in the event loop's small thread pool."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` in a thread, and returns or raises its outcome.

    A function that never returns only occupies its thread. It delays neither other calls nor the end of the process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:  # the boundary of the user's code: raised again by the caller below
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=getattr(function, "__name__", "agent"), daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
