"""Synchronous code of users beside the event loop: a thread of its own each, never one of the loop's few."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What ``function(*args, **kwargs)`` returns or raises.

    A function that never returns costs its thread: it holds up neither the next one nor the end of the process.
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
        except BaseException as raised:  # the boundary of the user's code: raised where it is awaited
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=getattr(function, "__name__", "agent"), daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result
