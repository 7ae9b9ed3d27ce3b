"""A role's heartbeat in `status/<job>.json`: its last progress, its waits and since when.

The role calls `progress()` whenever it made progress and wraps every wait in `waiting()`. A helper thread publishes
the state at least every `HEARTBEAT_S` seconds, so that a frozen process differs from one that waits. SIGUSR1 writes the
Python stacks of all threads to `<job>/stacks.txt`.
"""

import contextlib
import faulthandler
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pipelinerl.world.disk import replace_file

HEARTBEAT_S = 2.0
"""A thirtieth of `launcher.heartbeat_timeout_s`, so that late ones are no frozen role."""
MIN_WRITE_INTERVAL_S = 0.5
"""A busy role's status is written twice a second at most."""
STATUS_DIR = "status"
LAUNCHER = "launcher"
"""`on` of a wait for the launcher. No job has this name."""
BLOCKED_AT = "blocked_at"
"""Field of an actor's status: domain that has blocked the event loop of a rollout worker → `FILE:LINE in FUNCTION`."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    what: str
    on: str | None
    """Job or kind of job that ends the wait. None = no particular one."""
    since: float
    """Unix time."""


@dataclass(frozen=True, kw_only=True)
class StatusRecord:
    """One status file. `state` is running, done or failed."""

    job: str
    state: str
    pid: int
    hostname: str
    started: float
    heartbeat: float
    progress_at: float
    progress_count: int
    waits: tuple[Wait, ...]
    """Current waits, oldest first. Empty while the role works."""
    fields: dict[str, Any]
    """Latest values given to `progress`."""
    clock_offset: float = 0.0
    """Unix time minus the host's monotonic clock, when this was written."""
    working_since: float = 0.0
    """Unix time when the last wait ended, or the role's start."""

    def since_boot(self, clock_offset: float) -> "StatusRecord":
        """Return the record with times of the monotonic clock, which does not change when the system clock is set.

        Args:
            clock_offset: this host's Unix time minus its monotonic clock, for records of other hosts.
        """
        shift = self.clock_offset if self.hostname == socket.gethostname() else clock_offset
        return replace(
            self,
            started=self.started - shift,
            heartbeat=self.heartbeat - shift,
            progress_at=self.progress_at - shift,
            working_since=self.working_since - shift,
            waits=tuple(replace(wait, since=wait.since - shift) for wait in self.waits),
        )


class Activity:
    """Keeps a role's last progress and its waits. Calls are cheap and may come from any thread.

    Args:
        changed: called after every progress and every begin and end of a wait.
    """

    def __init__(self, changed: Callable[[], None]):
        self._changed = changed
        self._lock = threading.Lock()
        self._fields: dict[str, Any] = {}
        self._waits: dict[int, Wait] = {}
        self._wait_ids = itertools.count()
        self._began = self._started = self._progress_at = self._working_since = time.monotonic()
        self._progress_count = 0
        self._beats_with_progress = False

    def progress(self, fields: dict[str, Any]) -> None:
        with self._lock:
            self._progress_at = time.monotonic()
            self._fields |= fields
            if not self._progress_count:
                self._fields["ready_s"] = round(self._progress_at - self._began, 1)
            self._progress_count += 1
        self._changed()

    def note(self, fields: dict[str, Any]) -> None:
        with self._lock:
            self._fields |= fields
        self._changed()

    def begin(self) -> None:
        """Begin the time limit of the role's start now."""
        self._started = time.monotonic()

    def beat_with_progress(self) -> None:
        self._beats_with_progress = True

    @contextlib.contextmanager
    def waiting(self, what: str, on: str | None) -> Iterator[None]:
        key = next(self._wait_ids)
        with self._lock:
            self._waits[key] = Wait(what=what, on=on, since=time.monotonic())
        self._changed()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[key]
                if not self._waits:
                    self._working_since = time.monotonic()
            self._changed()

    def last_beat(self) -> float:
        return self._progress_at if self._beats_with_progress else time.monotonic()

    def record(self, job: str, state: str) -> StatusRecord:
        """Return the status as of now."""
        now = time.monotonic()
        offset = time.time() - now
        with self._lock:
            waits = sorted(self._waits.values(), key=lambda wait: wait.since)
            progress_at, working_since = self._progress_at, self._working_since
            count, fields = self._progress_count, dict(self._fields)
        return StatusRecord(
            job=job,
            state=state,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            started=self._started + offset,
            heartbeat=offset + self.last_beat(),
            progress_at=progress_at + offset,
            progress_count=count,
            waits=tuple(replace(wait, since=wait.since + offset) for wait in waits),
            fields=fields,
            clock_offset=offset,
            working_since=working_since + offset,
        )


class RoleStatus:
    """Publishes this role's status file until `close`.

    >>> status = RoleStatus(run_dir, "actor_0")
    >>> status.progress(groups=3)
    >>> with status.waiting("weights of version 4", on="finetune_0"): ...
    >>> status.close()
    """

    def __init__(self, run_dir: Path | str, job_name: str):
        self.job_name = job_name
        self._path = Path(run_dir) / STATUS_DIR / f"{job_name}.json"
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._state = "running"
        self._writing = threading.Lock()
        self._dirty = threading.Event()
        self._closed = threading.Event()
        self._activity = Activity(self._dirty.set)
        self._stacks = _register_stacks(Path(run_dir), job_name)
        self._write()
        self._thread = threading.Thread(target=self._publish, name="status", daemon=True)
        self._thread.start()

    def progress(self, **fields: Any) -> None:
        """Report progress with its newest values. The helper thread writes the file.

        The first call marks the role as ready. Make it before the role waits for data: from then on its waits are
        judged, and no longer its start.
        """
        self._activity.progress(fields)

    def note(self, **fields: Any) -> None:
        """Show values that are no progress. They are in the file when this returns."""
        self._activity.note(fields)
        self._write()

    def beat_with_progress(self) -> None:
        """Use the last progress as the heartbeat, for a role that represents another process (an engine, redis-server).

        The role calls `progress` for every answer of that process. If it freezes, the role counts as frozen too.
        """
        self._activity.beat_with_progress()

    def waiting(self, what: str, on: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Report a wait while the block runs. ``on``: the job or kind that ends it."""
        return self._activity.waiting(what, on)

    def last_beat(self) -> float:
        """Monotonic time of the current heartbeat."""
        return self._activity.last_beat()

    @contextlib.contextmanager
    def waiting_for_launcher(self, what: str) -> Iterator[None]:
        """Report a wait before the role's own start, whose time limit begins after it."""
        with self.waiting(what, on=LAUNCHER):
            yield
        self._activity.begin()

    def close(self, state: str = "done") -> None:
        """Publish the last state and stop the helper thread."""
        if self._closed.is_set():
            return
        self._state = state
        self._closed.set()
        self._dirty.set()
        self._thread.join(timeout=5)
        self._write()
        faulthandler.unregister(signal.SIGUSR1)
        self._stacks.close()

    def record(self) -> StatusRecord:
        return self._activity.record(self.job_name, self._state)

    def _publish(self) -> None:
        """Write the file when the status changed or the heartbeat is due. Ends when the status is closed."""
        while not self._closed.is_set():
            self._dirty.wait(timeout=HEARTBEAT_S)
            self._dirty.clear()
            if self._closed.is_set():
                return
            self._write()
            self._closed.wait(timeout=MIN_WRITE_INTERVAL_S)

    def _write(self) -> None:
        """Write the file. The role continues if it cannot be written, such as on a full disk."""
        with self._writing, contextlib.suppress(OSError):
            write_status(self._path, self.record())


class Waiting(Protocol):
    """The part of a role's status that ``CurrentWait`` uses."""

    def waiting(self, what: str, on: str | None = None) -> contextlib.AbstractContextManager[None]: ...


class CurrentWait:
    """A wait that lasts over many polls and begins with the first one.

    >>> wait = CurrentWait(status)
    >>> while not (groups := reader.poll(0.5)):
    ...     wait.be("the next group", on="actor_0")
    >>> wait.end()
    """

    def __init__(self, status: Waiting):
        self._status = status
        self._named: tuple[str, str | None] | None = None
        self._entered = contextlib.ExitStack()

    def be(self, what: str, on: str | None = None) -> None:
        """Replace the last wait by this one. Does nothing if it is the same."""
        if self._named != (what, on):
            before, self._entered = self._entered, contextlib.ExitStack()
            self._entered.enter_context(self._status.waiting(what, on=on))
            before.close()
            self._named = what, on

    def end(self) -> None:
        """End the wait, if there is one."""
        self._entered.close()
        self._named = None


def write_status(path: Path, record: StatusRecord) -> None:
    document = vars(record) | {"waits": [vars(wait) for wait in record.waits]}
    replace_file(path, json.dumps(document, default=str), mode=0o600)


def read_statuses(run_dir: Path | str) -> dict[str, StatusRecord]:
    """Return every role's newest status by status name. Files that cannot be read are left out."""
    statuses = {}
    for path in sorted((Path(run_dir) / STATUS_DIR).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            document = json.loads(path.read_text(encoding="utf-8"))
            waits = tuple(Wait(**wait) for wait in document.pop("waits"))
            statuses[path.stem] = StatusRecord(**document, waits=waits)
    return statuses


def _register_stacks(run_dir: Path, job_name: str) -> Any:
    """Make SIGUSR1 append all threads' stacks to `<job>/stacks.txt`. Returns the file, which must stay open."""
    job, _, rank = job_name.partition(".")
    path = run_dir / job / (f"stacks.{rank}.txt" if rank else "stacks.txt")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    stream = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
    return stream
