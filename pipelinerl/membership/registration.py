"""A role's own lease, renewed by a thread while the role shows that it is alive.

Consumes: the role's sign of life. Produces: at least four renewals per length of the lease. Waits for: nothing. While
the store is away it tries again: observers cannot read it either. Ends: at ``close``.
"""

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from pipelinerl.membership.lease import MAX_STEP_S, Lease
from pipelinerl.membership.stores import LeaseStore, StoreAwayError

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = MAX_STEP_S
"""As much silence as an observer counts at once. Also the longest wait until a role reads a request to leave."""
RENEWALS_PER_LEASE = 4
"""Three renewals in a row may be late before a lease runs out."""


def pause_s(ttl_s: float) -> float:
    """Seconds between two renewals of a lease of this length."""
    return min(LONGEST_PAUSE_S, ttl_s / RENEWALS_PER_LEASE)


class Registration:
    """Renews the lease of this process.

    Args:
        lease: the first lease.
        life: returns a value that changes as long as the role, such as its engine, is alive.
        on_taken: called once, from the thread, when another process has taken the name.
        is_claimed: the name was already claimed with ``lease.incarnation``.
    """

    def __init__(
        self,
        store: LeaseStore,
        lease: Lease,
        *,
        life: Callable[[], float],
        on_taken: Callable[[], None],
        is_claimed: bool = False,
    ):
        self._store, self._lease, self._life, self._on_taken = store, lease, life, on_taken
        self._is_written = is_claimed
        self._last_life: float | None = None
        self._changed = threading.Event()
        self._written = threading.Event()
        self._closed = threading.Event()
        self._is_away = False
        self._asked = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> Lease:
        """The current lease. Its last change may not be written yet."""
        return self._lease

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether this member was asked to drain and end."""
        return self._asked.is_set()

    def update(self, **changes: Any) -> None:
        """Change fields of the lease. The thread writes it at once."""
        with self._lock:
            changed = msgspec.structs.replace(self._lease, **changes)
            if changed != self._lease:
                self._lease = changed
                self._written.clear()
                self._changed.set()

    def wait_until_written(self, timeout_s: float) -> bool:
        """Wait until the last change is in the store. Returns False after ``timeout_s``."""
        return self._written.wait(timeout_s)

    def close(self, *, removes: bool = True) -> None:
        """Stop the thread and delete the lease. ``removes=False`` leaves it, so that others read its ending."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._changed.set()
        self._thread.join()
        if not removes:
            return
        with contextlib.suppress(StoreAwayError):
            self._store.remove(self._lease)

    def _run(self) -> None:
        while not self._closed.is_set():
            life = self._life()
            changed = self._changed.is_set()
            self._changed.clear()
            if changed or life != self._last_life:
                self._last_life = life
                if not self._renew():
                    return
            self._changed.wait(pause_s(self._lease.ttl_s))

    def _renew(self) -> bool:
        """Write the lease. Returns False if the name belongs to another process."""
        with self._lock:
            self._lease = msgspec.structs.replace(self._lease, sequence=self._lease.sequence + 1)
            lease = self._lease
        try:
            if not self._is_written:
                self._store.overwrite(lease)
                self._is_written = True
            elif not self._store.renew(lease):
                log.error("event=lease_taken name=%s: another process has taken this role's place", lease.name)
                self._closed.set()
                self._on_taken()
                return False
            if self._store.is_asked_to_leave(lease.name):
                self._asked.set()
        except StoreAwayError as error:
            if not self._is_away:
                log.warning("event=lease_not_renewed name=%s reason=%s", lease.name, error)
            self._is_away, self._last_life = True, None
            return True
        self._is_away = False
        with self._lock:
            if self._lease is lease:
                self._written.set()
        return True


def new_incarnation() -> str:
    return secrets.token_hex(8)
