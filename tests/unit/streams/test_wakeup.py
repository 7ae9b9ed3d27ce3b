"""Waiting for a write: what is written after the first wait ends the next one, with and without the kernel's help."""

import threading
import time
from pathlib import Path

import pytest

from pipelinerl.streams import wakeup
from pipelinerl.streams.wakeup import FolderWatch

NEVER_S = 1e5
"""Longer than a test may last."""


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeup, "_UNREPORTED_S", NEVER_S)


def test_write_before_the_wait_ends_it(tmp_path: Path):
    watch = FolderWatch(tmp_path)
    watch.wait(NEVER_S)  # begins the watch and returns at once
    (tmp_path / "file").write_bytes(b"x")
    watch.wait(NEVER_S)
    watch.close()


def test_append_during_the_wait_ends_it(tmp_path: Path):
    with open(tmp_path / "file", "wb", buffering=0) as file:
        watch = FolderWatch(tmp_path)
        watch.wait(NEVER_S)
        timer = threading.Timer(0.05, file.write, [b"x"])
        timer.start()
        watch.wait(NEVER_S)
        timer.join()
        watch.close()


def test_wait_ends_at_its_timeout(tmp_path: Path):
    watch = FolderWatch(tmp_path)
    watch.wait(NEVER_S)
    start = time.monotonic()
    watch.wait(0.05)
    assert time.monotonic() - start >= 0.045
    watch.close()


def test_wait_without_a_watch_returns_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FolderWatch, "_watch", lambda self: False)
    watch = FolderWatch(tmp_path)
    for _ in range(3):
        watch.wait(NEVER_S)
    FolderWatch(tmp_path / "missing").wait(NEVER_S)
    watch.close()
