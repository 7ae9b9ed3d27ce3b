"""The interface of a store of leases, and the store in a run folder that all roles share. `redis` is the other store.

<run folder>/members/<name>.json     a lease, replaced as a whole with each renewal
<run folder>/members/<name>.leave    this member was asked to leave
"""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Protocol

import msgspec

from pipelinerl.errors import PipelineRLError
from pipelinerl.membership.lease import Lease
from pipelinerl.world.disk import replace_file

FOLDER = "members"


class StoreAwayError(PipelineRLError):
    """The leases cannot be read or written now. The same call may work later."""


class StoreRefusedError(StoreAwayError):
    """The store refuses this process, because it does not know the run's secret."""


class LeaseStore(Protocol):
    """The leases of one run. Every method raises ``StoreAwayError`` if the store does not answer."""

    def claim(self, lease: Lease) -> bool:
        """Write a lease if its name is free. Returns False if the name is taken."""
        ...

    def overwrite(self, lease: Lease) -> None:
        """Write a lease even if the name was taken. Deletes a request to leave, which was for the previous holder."""
        ...

    def renew(self, lease: Lease) -> bool:
        """Write this incarnation's lease, also if it was deleted. Returns False if another incarnation has the name."""
        ...

    def remove(self, lease: Lease) -> None:
        """Delete the lease of this incarnation if it is still there."""
        ...

    def leases(self) -> dict[str, Lease]:
        """Return every lease that can be read, by name."""
        ...

    def ask_to_leave(self, name: str) -> None:
        """Ask the member with this name to drain and end."""
        ...

    def is_asked_to_leave(self, name: str) -> bool:
        """Whether the member with this name was asked to leave."""
        ...


class FolderStore:
    """Leases as files in a run folder that all roles share."""

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / FOLDER

    def claim(self, lease: Lease) -> bool:
        with _disk():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._folder / f".{lease.name}.{secrets.token_hex(4)}"
            replace_file(temporary, msgspec.json.encode(lease), mode=0o600)
            try:
                os.link(temporary, self._path(lease.name))
            except FileExistsError:
                return False
            finally:
                temporary.unlink(missing_ok=True)
            return True

    def overwrite(self, lease: Lease) -> None:
        with _disk():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._leave_path(lease.name).unlink(missing_ok=True)
            replace_file(self._path(lease.name), msgspec.json.encode(lease), mode=0o600)

    def renew(self, lease: Lease) -> bool:
        with _disk():
            holder = self._read(self._path(lease.name))
            if holder is not None and holder.incarnation != lease.incarnation:
                return False
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path(lease.name), msgspec.json.encode(lease), mode=0o600)
            return True

    def remove(self, lease: Lease) -> None:
        with _disk():
            holder = self._read(self._path(lease.name))
            if holder is not None and holder.incarnation == lease.incarnation:
                self._path(lease.name).unlink(missing_ok=True)
                self._leave_path(lease.name).unlink(missing_ok=True)

    def leases(self) -> dict[str, Lease]:
        with _disk():
            found = [self._read(path) for path in sorted(self._folder.glob("[!.]*.json"))]
        return {lease.name: lease for lease in found if lease is not None}

    def ask_to_leave(self, name: str) -> None:
        with _disk():
            self._leave_path(name).touch(mode=0o600)

    def is_asked_to_leave(self, name: str) -> bool:
        with _disk():
            return self._leave_path(name).exists()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _leave_path(self, name: str) -> Path:
        return self._folder / f"{name}.leave"

    def _read(self, path: Path) -> Lease | None:
        """Read a lease. None if there is no file or it holds no lease of this name."""
        with contextlib.suppress(FileNotFoundError):
            return decode_lease(path.stem, path.read_bytes())
        return None


def decode_lease(name: str, content: bytes) -> Lease | None:
    """Decode a lease. None if the bytes are no lease of this name, which then counts as not renewed."""
    try:
        lease = msgspec.json.decode(content, type=Lease)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return lease if lease.name == name else None


@contextlib.contextmanager
def _disk():
    try:
        yield
    except OSError as error:
        raise StoreAwayError(f"the leases in the run folder: {error}") from error
