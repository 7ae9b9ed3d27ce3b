"""Waits for a condition with a deadline: what tests do instead of sleeping."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], deadline_s: float = 200.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.005)
