"""Notices a domain that blocks the event loop of its worker, so that all other rollouts of the worker stand still.

The loop notes the time at every tick, and a thread looks at the loop's stack when the note is old. Time in which the
process was not run is taken off, so a busy or stopped machine is not taken for a domain that blocks.
"""

import asyncio
import functools
import inspect
import logging
import sys
import sysconfig
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from pipelinerl.actor.messages import Blocked

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Interval at which the loop notes the time. A block is measured to this precision."""
BLOCKED_S = 0.5
"""A longer pause is reported."""
LOG_EVERY_S = 30.0
"""Least time between two lines about one domain."""
UNKNOWN = "unknown"
"""Name of the domain, where the loop was blocked by code outside any rollout."""
NOT_SEEN = "a place that was not seen"
STACK_FRAMES = 6
"""Innermost frames that the log names."""
LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
PACKAGE = f"{Path(__file__).parents[1]}/"


@dataclass(frozen=True)
class LoopStack:
    """What the loop's thread was doing."""

    domain: str
    where: str
    """`FILE:LINE in FUNCTION` of the innermost frame of the domain's own code, or of ours if the domain awaits it."""
    stack: tuple[str, ...]
    """Likewise of the innermost frames, the innermost one last."""


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Times of the loop's thread and of the thread that looks at it, since the last tick."""

    pause_s: float
    """By which the tick came late."""
    cpu_s: float
    """CPU time of the loop's thread."""
    delay_s: float
    """For which the loop's thread was ready and got no CPU."""
    late_s: float
    """By which the thread that looks came late."""


def blocked_s(times: LoopTimes) -> float:
    """For how long code blocked the loop, in seconds."""
    # Not blocked, but late: the thread was ready and got no CPU (`delay_s`), or the whole process was stopped, and then
    # the looking thread was late, too. It is also late while the loop's thread computes and keeps the interpreter's
    # lock, which is a block: so its lateness counts only as far as the loop's thread neither computed nor waited.
    stopped_s = max(0.0, times.late_s - times.cpu_s - times.delay_s)
    return times.pause_s - times.delay_s - stopped_s


def busy_s(times: LoopTimes, process_s: float) -> float:
    """Seconds since the last tick in which the process computed (``process_s``, all cores) or the loop was blocked."""
    return min(TICK_S + times.pause_s, max(process_s, blocked_s(times)))  # threads may have computed on other cores


class LoopWatchdog:
    """Measures the pauses of the running event loop from ``start`` to ``stop``. Both are called in it.

    Args:
        domains: rollout functions by the name of their domain.
        domain_of: returns the domain whose rollout a task is, or None.
        run_delay_s: returns the seconds for which a thread, by its native id, was ready to run and did not.
    """

    def __init__(
        self,
        domains: Mapping[str, Callable[..., Any]],
        domain_of: Callable[[asyncio.Task[Any]], str | None] = lambda task: None,
        run_delay_s: Callable[[int], float] | None = None,
    ):
        self._files = {file: name for name, function in domains.items() if (file := file_of(function))}
        shared = Counter(map(file_of, domains.values()))
        self._domain_of_file = {file: name for file, name in self._files.items() if shared[file] == 1}
        self._domain_of, self._run_delay_s = domain_of, run_delay_s or read_run_delay_s
        self.blocked: dict[str, Blocked] = {}
        """Domain → its pauses that were long."""
        self.busy_s = 0.0
        """Since the start, as of the function of this name."""
        self._unlogged: defaultdict[str, list[float]] = defaultdict(list)
        self._logged_at: dict[str, float] = {}
        self._seen: Counter[LoopStack] = Counter()
        self._late_s = 0.0
        self._ended = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread, self._native_id = threading.get_ident(), threading.get_native_id()
        self._looked = time.monotonic()
        self._note_times()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        threading.Thread(target=self._look, name="loop-watchdog", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()
        self._timer.cancel()

    def _note_times(self) -> None:
        self._beat, self._cpu_s, self._process_s = time.monotonic(), time.thread_time(), time.process_time()
        self._delay_s, self._late_s = self._run_delay_s(self._native_id), 0.0

    def _tick(self) -> None:
        now = time.monotonic()
        times = LoopTimes(
            pause_s=now - self._beat - TICK_S,
            cpu_s=time.thread_time() - self._cpu_s,
            delay_s=self._run_delay_s(self._native_id) - self._delay_s,
            late_s=self._late_s + self._lateness(now),
        )
        self.busy_s += busy_s(times, time.process_time() - self._process_s)
        seen, self._seen = self._seen, Counter()
        self._note_times()
        if (seconds := blocked_s(times)) > BLOCKED_S:
            known = [stack for stack, _ in seen.most_common() if stack.domain != UNKNOWN] or list(seen)
            self._report(known[0] if known else LoopStack(UNKNOWN, NOT_SEEN, ()), seconds, now)
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _lateness(self, now: float) -> float:
        """By how much the look that should have come by now is late, as far as it was due after the last tick."""
        return max(0.0, now - max(self._looked + TICK_S, self._beat))

    def _look(self) -> None:
        """Looks at the loop's thread whenever its last tick is old. Ends with ``stop``. Runs in a thread of its own."""
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            self._late_s += self._lateness(now)
            self._looked = now
            if now - self._beat > TICK_S + BLOCKED_S / 2:
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 — the only way to a stack
                if frame is not None:
                    self._seen[self._stack_of(frame)] += 1

    def _stack_of(self, innermost: FrameType) -> LoopStack:
        frames: list[FrameType] = []
        frame: FrameType | None = innermost
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return LoopStack(
            self._domain(frames), line_of(self._guilty(frames)), tuple(map(line_of, reversed(frames[:STACK_FRAMES])))
        )

    def _guilty(self, frames: list[FrameType]) -> FrameType:
        """The innermost frame of the domain's own code, or of ours if a coroutine of ours blocks."""
        ours: FrameType | None = None
        for frame in frames:
            if self._is_own(frame):
                return frame
            if frame.f_code.co_filename.startswith(PACKAGE):
                ours = ours or frame
                if frame.f_code.co_flags & inspect.CO_COROUTINE:
                    return ours
        return frames[0]

    def _domain(self, frames: list[FrameType]) -> str:
        """The domain whose rollout runs. A task that a rollout began is known by the file of its code."""
        task = asyncio.current_task(self._loop)
        if task is not None and (name := self._domain_of(task)):
            return name
        names = (self._domain_of_file.get(frame.f_code.co_filename) for frame in frames)
        return next(filter(None, names), UNKNOWN)

    def _is_own(self, frame: FrameType) -> bool:
        """Whether the frame is of a domain's code and not of a library."""
        file = frame.f_code.co_filename
        return file in self._files or not file.startswith(("<frozen", PACKAGE, *LIBRARIES))

    def _report(self, seen: LoopStack, seconds: float, now: float) -> None:
        domain = seen.domain
        before = self.blocked.get(domain)
        self.blocked[domain] = Blocked(seconds=seconds + (before.seconds if before else 0.0), where=seen.where)
        self._unlogged[domain].append(seconds)
        if now - self._logged_at.get(domain, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged_at[domain] = now
        pauses = self._unlogged.pop(domain)
        log.warning(
            "event=loop_blocked domain=%s times=%d seconds=%.1f last_s=%.1f at=%s note=all rollouts of this worker "
            "stood still meanwhile: run the blocking call in a thread, `await asyncio.to_thread(function, ...)`, or "
            "use an async library; in a line of PipelineRL's own, long prompts and answers do it stack=%s",
            *(domain, len(pauses), sum(pauses), seconds, seen.where, " > ".join(seen.stack) or NOT_SEEN),
        )


def line_of(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


def file_of(function: Callable[..., Any]) -> str | None:
    """The file of the module in which a function, or the class of an object that is called, is defined."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    return getattr(sys.modules.get(module), "__file__", None)


def read_run_delay_s(native_id: int) -> float:
    """As Linux counts it. 0 where it does not."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", encoding="utf-8") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
