"""A file system of a run's own, filling it to the last byte, and having all writes wait."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

DISK_MB = 1024
REFILL_S = 0.05


@contextlib.contextmanager
def own_disk(run_dir: Path, *, freezable: bool = False) -> Iterator[None]:
    """Puts the run folder on a file system of its own of ``DISK_MB``: a tmpfs, or ext4 in a file. Needs root."""
    run_dir.mkdir(parents=True, mode=0o700)
    image = Path(f"{run_dir}.image")
    if freezable:
        with image.open("wb") as file:
            file.truncate(DISK_MB * 2**20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(run_dir)], check=True)
    else:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=700", "tmpfs", str(run_dir)], check=True)
    try:
        yield
    finally:
        kept = Path(f"{run_dir}.kept")
        shutil.copytree(run_dir, kept)
        subprocess.run(["umount", "-l", str(run_dir)], check=True)
        run_dir.rmdir()
        kept.rename(run_dir)
        image.unlink(missing_ok=True)


def freeze_writes(folder: Path, seconds: float) -> None:
    """Has every write to the folder's file system wait for a while. It must be ``freezable``."""
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        time.sleep(seconds)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)


def fill(folder: Path, seconds: float) -> None:
    """Leaves no byte free on the folder's file system, for a while."""
    path = folder.parent / folder.name / "filler"
    with path.open("wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(2**20))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with path.open("ab", buffering=0) as filler, contextlib.suppress(OSError):
            filler.write(bytes(4096))  # takes what was freed meanwhile
        time.sleep(REFILL_S)
    path.unlink()
