"""What a power cut leaves of a folder: a model of the disk that learns from every sync what has become durable.

While ``recording``, every `fsync`, `fdatasync`, rename and deletion of this process is an event. A file's durable
content is the one of its last sync, whoever wrote it and however: the model reads it from the file system at that
moment. A folder's durable entries are those of its last sync. A cut at an event leaves what is durable, and of the rest
what a seed decides: a content in part or whole, renames and deletions that were not synced, in any order.

``recording`` sees this process, ``recording_processes`` all Python processes of a run. Not seen: syncs that native code
makes by itself. What native code writes and Python syncs is seen.
"""

import os
import random
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Entries = dict[str, int]
"""Name in a folder → inode."""


@dataclass
class Cut:
    """The disk at one event: durable and present state."""

    event: str
    root: int
    durable: dict[int, Entries]
    """By the folder's inode: a renamed folder keeps its entries."""
    present: dict[int, Entries]
    synced: dict[int, bytes]
    written: dict[int, bytes]
    trained: int

    def rebuild(self, target: Path, seed: int | None) -> None:
        """Writes the folder as a cut leaves it; ``seed`` None: nothing that was not synced survives."""
        rng = random.Random(seed)
        self._folder(self.root, target, rng if seed is not None else None)

    def _folder(self, folder: int, target: Path, rng: random.Random | None) -> None:
        target.mkdir(parents=True, exist_ok=True)
        entries = dict(self.durable.get(folder, {}))
        if rng is not None:
            now = self.present.get(folder, {})
            for entry in sorted(entries.keys() | now.keys()):
                if entries.get(entry) != now.get(entry) and rng.random() < 0.5:
                    entries.pop(entry, None)
                    if entry in now:
                        entries[entry] = now[entry]
        for entry, inode in sorted(entries.items()):
            if inode in self.durable or inode in self.present:
                self._folder(inode, target / entry, rng)
            else:
                (target / entry).write_bytes(self._content(inode, rng))

    def _content(self, inode: int, rng: random.Random | None) -> bytes:
        synced, written = self.synced.get(inode, b""), self.written.get(inode, b"")
        if rng is None or written == synced or not written.startswith(synced):
            return synced
        kept = written[: rng.randint(len(synced), len(written))]
        return kept + bytes(rng.choice((0, 0, 4096)))  # space that was allotted and not filled


@dataclass
class Disk:
    """Records the cuts of one folder."""

    root: Path
    cuts: list[Cut] = field(default_factory=list)
    trained: int = 0
    """What the workload has reached, noted with every cut."""
    wanted: Callable[[int], bool] = lambda _: True
    """Whether to keep the cut at the event of this number."""
    events: int = 0
    _durable: dict[int, Entries] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)
    """Descriptors by inode, so that no number is used a second time."""
    _synced: dict[int, bytes] = field(default_factory=dict)
    _read: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """Contents by inode, size and time, so that cuts share them."""

    def begin(self) -> None:
        """All that the folder holds now is durable."""
        for folder, _, files in os.walk(self.root):
            self._durable[self._hold(folder)] = entries_of(folder)
            for file in files:
                path = Path(folder, file)
                self._synced[self._hold(path)] = path.read_bytes()

    def sync(self, path: str) -> None:
        name = self._name(path)
        if name is None:
            return
        if os.path.isdir(path):
            self._durable[self._hold(path)] = entries_of(path)
            for entry in os.listdir(path):
                with suppress(FileNotFoundError):
                    self._hold(Path(path, entry))
        else:
            self._synced[self._hold(path)] = Path(path).read_bytes()
        self.note(f"sync {name}")

    def note(self, event: str) -> None:
        self.events += 1
        if not self.wanted(self.events):
            return
        present, written = {}, {}
        for folder, _, files in os.walk(self.root):
            present[self._hold(folder)] = entries_of(folder)
            for file in files:
                with suppress(FileNotFoundError):  # other processes go on
                    inode, content = self._content(Path(folder, file))
                    written[inode] = content
        root = os.stat(self.root).st_ino
        durable = {inode: dict(entries) for inode, entries in self._durable.items()}
        self.cuts.append(Cut(event, root, durable, present, dict(self._synced), written, self.trained))

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)

    def _content(self, path: Path) -> tuple[int, bytes]:
        inode, found = self._hold(path), path.stat()
        key = (inode, found.st_size, found.st_mtime_ns)
        if key not in self._read:
            self._read[key] = path.read_bytes()
        return inode, self._read[key]

    def _hold(self, path: str | Path) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_PATH)
        return inode

    def _name(self, path: str) -> str | None:
        try:
            name = Path(path).resolve().relative_to(self.root)
        except ValueError:
            return None
        return "" if str(name) == "." else str(name)


def entries_of(folder: str) -> Entries:
    with os.scandir(folder) as found:
        return {entry.name: entry.inode() for entry in found}


@contextmanager
def recording(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk model of ``root``, which is durable with all it holds at the beginning."""
    disk = Disk(root.resolve())
    disk.begin()

    def hook(name: str, is_sync: bool) -> None:
        original = getattr(os, name)

        def hooked(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if is_sync:
                disk.sync(os.readlink(f"/proc/self/fd/{args[0]}"))
            else:
                disk.note(f"{name} {args[0]}")
            return result

        patch.setattr(os, name, hooked)

    with monkeypatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            hook(name, is_sync=True)
        for name in ("replace", "rename", "unlink"):
            hook(name, is_sync=False)
        try:
            yield disk
        finally:
            disk.close()


@contextmanager
def recording_processes(root: Path, address: Path, wanted: Callable[[int], bool]) -> Iterator[Disk]:
    """The disk model of ``root``, fed by the processes that are started meanwhile with this environment.

    Args:
        root: the run folder. It need not exist yet.
        address: path of the recorder's socket.
        wanted: which events to keep as cuts, by number.
    """
    disk = Disk(root, wanted=wanted)

    class Events(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            event, _, path = self.rfile.read().decode().partition(" ")
            with suppress(FileNotFoundError):
                disk.sync(path) if event == "sync" else disk.note(f"{event} {path}")
            self.wfile.write(b".")

    hooks = str(Path(__file__).parent / "power_cut_hook")
    variables = {"POWER_CUT_RECORDER": str(address), "POWER_CUT_ROOT": str(root)}
    variables["PYTHONPATH"] = os.pathsep.join([hooks, *filter(None, [os.environ.get("PYTHONPATH")])])
    with pytest.MonkeyPatch.context() as patch, socketserver.UnixStreamServer(str(address), Events) as server:
        for name, value in variables.items():
            patch.setenv(name, value)
        server.request_queue_size = 128
        server.socket.listen(128)
        thread = threading.Thread(target=server.serve_forever, name="power-cut-recorder")
        thread.start()
        try:
            yield disk
        finally:
            server.shutdown()
            thread.join()
            disk.close()
