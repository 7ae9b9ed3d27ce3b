"""Signals around the engine's start, whenever they come."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.inference import signals


def is_set() -> threading.Event:
    stop = threading.Event()
    stop.set()
    return stop


def test_signal_before_the_engines_start_ends_the_process_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: Any) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(signals, "_end_start", end)
    with pytest.raises(SystemExit, match="a role's status"), signals.signals_end_the_start("a role's status", is_set()):
        pytest.fail("the engine was started")


async def test_signal_after_the_engines_start_ends_the_server_as_soon_as_it_serves() -> None:
    app = SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(should_exit=False)))
    asked = asyncio.Event()
    await asyncio.wait_for(signals.end_when_asked(app, asked, is_set()), timeout=60)
    assert app.state.server.should_exit
    assert asked.is_set()  # else the end would be told as the engine's
