"""An actor without a trainer: one version on the servers that answer, an end, and no wait for servers that are gone."""

import time
from collections.abc import Callable, Iterator

import pytest

from pipelinerl.actor import without_trainer
from pipelinerl.actor.without_trainer import OneVersion
from pipelinerl.errors import DeadlineError
from pipelinerl.membership.lease import LiveServer
from pipelinerl.world import Job
from tests.says import says

SERVERS = {name: LiveServer(Job(name=name, kind="actor_llm", url=f"http://{name}")) for name in ("a", "b")}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    up: set[str] = set()
    monkeypatch.setattr(without_trainer, "is_healthy", lambda url: url.removeprefix("http://") in up)
    monkeypatch.setattr(without_trainer, "POLL_S", 0.01)
    return up


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_version_is_there_once_a_server_answers(healthy: set[str]) -> None:
    enough: list[bool] = []
    state = OneVersion(lambda: SERVERS, lambda: bool(enough), startup_s=60, silence_s=60)
    assert state.weights == (None, {})
    state.start_listening()
    healthy.add("b")
    until(lambda: state.weights == (0, {"b": 0}))
    healthy.add("a")
    until(lambda: state.weights == (0, {"a": 0, "b": 0}))
    assert not state.training_done
    enough.append(True)
    assert state.training_done
    state.stop()


def test_servers_that_are_gone_end_the_wait(healthy: set[str]) -> None:
    healthy.add("a")
    state = OneVersion(lambda: SERVERS, lambda: False, startup_s=60, silence_s=0.05)
    state.start_listening()
    until(lambda: state.weights == (0, {"a": 0}))
    healthy.clear()
    with pytest.raises(DeadlineError, match=says("0.05 s", "a", "b")):
        until(lambda: state.weights == (0, {}) and False)
    state.stop()


def test_servers_that_never_answer_are_reported_after_the_start(healthy: set[str]) -> None:
    state = OneVersion(dict, lambda: True, startup_s=0.0, silence_s=60)
    time.sleep(0.001)
    assert not state.training_done
    with pytest.raises(DeadlineError, match="none"):
        _ = state.weights
