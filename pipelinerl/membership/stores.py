"""Where leases lie: the run folder, where the roles share one. `redis` is the other store.

<run folder>/members/<name>.json     a lease, replaced whole with each renewal
<run folder>/members/<name>.leave    somebody asked this member to leave
"""

import contextlib
import os
import secrets
from pathlib import Path
from typing import Protocol

import msgspec

from pipelinerl.disk import replace_file
from pipelinerl.errors import PipelineRLError
from pipelinerl.membership.lease import Lease

FOLDER = "members"


class StoreAwayError(PipelineRLError):
    """The leases cannot be read or written now; the same call may work later."""


class LeaseStore(Protocol):
    """The leases of one run. Every method raises ``StoreAwayError`` when the store does not answer."""

    def claim(self, lease: Lease) -> bool:
        """Writes a lease under a name that nobody has; False if somebody has it."""
        ...

    def take(self, lease: Lease) -> None:
        """Writes a lease, whoever had the name before. A request to leave was meant for that one and goes."""
        ...

    def renew(self, lease: Lease) -> bool:
        """Replaces this incarnation's lease, or one that was deleted; False if another incarnation has the name."""
        ...

    def remove(self, lease: Lease) -> None:
        """Deletes the lease of this incarnation, if it is still there."""
        ...

    def leases(self) -> dict[str, Lease]:
        """Every lease that can be read, by name."""
        ...

    def ask_to_leave(self, name: str) -> None:
        """Asks whoever has the name to drain and end."""
        ...

    def is_asked_to_leave(self, name: str) -> bool:
        """Whether somebody did."""
        ...


class FolderStore:
    """Leases as files of a folder that all roles share."""

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

    def take(self, lease: Lease) -> None:
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
        """The lease; None where there is none or the file is not one of this name."""
        with contextlib.suppress(FileNotFoundError):
            return decode(path.stem, path.read_bytes())
        return None


def decode(name: str, content: bytes) -> Lease | None:
    """The lease in these bytes; None if it is not one of this name: such a lease counts as not renewed."""
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
