"""What a program changes in its process, and puts back."""

import os
import signal
import sys

import pytest

from pipelinerl.world.process import process_restored


def changes() -> None:
    os.umask(0o027)
    os.environ.update(PRL_NEW="1", PRL_CHANGED="2")
    del os.environ["PRL_REMOVED"]
    sys.argv = ["another", "command"]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def changes_and_fails() -> None:
    changes()
    raise BlockingIOError


def umask() -> int:
    os.umask(found := os.umask(0))
    return found


def test_process_is_restored_when_its_program_returns_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRL_CHANGED", "1")
    monkeypatch.setenv("PRL_REMOVED", "1")
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = umask(), dict(os.environ), list(sys.argv), [signal.getsignal(number) for number in numbers]
    with process_restored():
        changes()
    assert (umask(), dict(os.environ), sys.argv, [signal.getsignal(number) for number in numbers]) == before
    with pytest.raises(BlockingIOError), process_restored():
        changes_and_fails()
    assert (umask(), dict(os.environ), sys.argv, [signal.getsignal(number) for number in numbers]) == before
