"""A role's heartbeat file: states, waits, stacks, and what a reader makes of it."""

import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.observability.status import HEARTBEAT_S, Activity, CurrentWait, RoleStatus, read_statuses


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_frozen_role_has_missed_thirty_heartbeats() -> None:
    assert parse(compose("quickstart", ["output_dir=x"])).launcher.heartbeat_timeout_s >= 30 * HEARTBEAT_S


def test_status_progress_is_published_soon(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "actor_0")
    first = read_statuses(tmp_path)["actor_0"]
    assert (first.state, first.pid, first.progress_count, first.waits) == ("running", os.getpid(), 0, ())
    status.progress(groups=1)
    status.progress(version=4)
    until(lambda: read_statuses(tmp_path)["actor_0"].fields.items() >= {"groups": 1, "version": 4}.items())
    assert read_statuses(tmp_path)["actor_0"].progress_count == 2
    status.close()


def test_status_that_beats_with_progress_is_silent_without(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "redis_0")
    assert status.record().heartbeat > status.record().progress_at
    status.beat_with_progress()
    status.progress()
    record = status.record()
    assert record.heartbeat == record.progress_at
    status.close()


def test_status_waits_are_named_oldest_first_while_they_last(tmp_path: Path) -> None:
    status, before = RoleStatus(tmp_path, "actor_0"), time.time()
    with status.waiting("weights", on="finetune_0"), status.waiting("a server", on="actor_llm"):
        until(lambda: len(read_statuses(tmp_path)["actor_0"].waits) == 2)
        waits = read_statuses(tmp_path)["actor_0"].waits
        assert [(wait.what, wait.on) for wait in waits] == [("weights", "finetune_0"), ("a server", "actor_llm")]
        assert before <= waits[0].since <= waits[1].since <= time.time()
    until(lambda: read_statuses(tmp_path)["actor_0"].waits == ())
    status.close()


def test_activity_of_many_threads_is_whole() -> None:
    """Waits of several threads overlap: none is lost, and none stays when it has ended."""
    activity, rounds = Activity(lambda: None), 2000
    seen: list[bool] = []

    def work(name: str) -> None:
        for number in range(rounds):
            with activity.waiting(name, on=None), activity.waiting(name, on=None):
                seen.append([wait.what for wait in activity.record("actor_0", "running").waits].count(name) == 2)
                activity.progress({name: number})

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(f"thread {number}",)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    record = activity.record("actor_0", "running")
    assert all(seen)
    assert record.waits == ()
    assert record.progress_count == len(seen) == 4 * rounds
    assert {key: value for key, value in record.fields.items() if key != "ready_s"} == {
        f"thread {number}": rounds - 1 for number in range(4)
    }


def test_status_work_begins_when_the_last_wait_ends(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "finetune_0")
    with status.waiting("weights"):
        with status.waiting("a server"):
            began = status.record().waits[0].since
        assert status.record().working_since <= began
    assert began < status.record().working_since <= time.time()
    status.close()


def test_current_wait_lasts_over_polls_and_is_replaced_without_a_gap(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "actor_0")
    started, wait = status.record().working_since, CurrentWait(status)
    wait.be("the next group", on="actor_0")
    began = status.record().waits[0].since
    wait.be("the next group", on="actor_0")
    assert [(each.what, each.since) for each in status.record().waits] == [("the next group", pytest.approx(began))]
    wait.be("reference log-probs", on="preprocessor_llm")
    assert [each.what for each in status.record().waits] == ["reference log-probs"]
    assert status.record().working_since == pytest.approx(started), "it has waited without a pause"
    wait.end()
    wait.end()
    assert status.record().waits == ()
    wait.be("reference log-probs", on="preprocessor_llm")
    assert status.record().waits[0].on == "preprocessor_llm"
    status.close()


def test_status_wait_ends_with_its_exception(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "actor_0")
    with pytest.raises(KeyError):
        with status.waiting("weights"):
            raise KeyError
    assert status.record().waits == ()
    status.close()


@pytest.mark.parametrize("state", ["done", "failed"])
def test_status_close_publishes_the_last_state_once(tmp_path: Path, state: str) -> None:
    status = RoleStatus(tmp_path, "actor_0")
    status.progress(step=9)
    status.close(state)
    status.close("something else")
    record = read_statuses(tmp_path)["actor_0"]
    assert (record.state, record.fields["step"]) == (state, 9)


def test_status_heartbeat_goes_on_while_nothing_moves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("pipelinerl.observability.status.HEARTBEAT_S", 0.05)
    status = RoleStatus(tmp_path, "actor_0")
    first = read_statuses(tmp_path)["actor_0"].heartbeat
    until(lambda: read_statuses(tmp_path)["actor_0"].heartbeat > first)
    assert read_statuses(tmp_path)["actor_0"].progress_count == 0
    status.close()


def test_status_files_are_private_and_foreign_files_ignored(tmp_path: Path) -> None:
    RoleStatus(tmp_path, "actor_0").close()
    assert stat.S_IMODE((tmp_path / "status" / "actor_0.json").stat().st_mode) == 0o600
    (tmp_path / "status" / "torn.json").write_text('{"job": "to')
    (tmp_path / "status" / "other.json").write_text(json.dumps({"something": "else"}))
    assert set(read_statuses(tmp_path)) == {"actor_0"}


def test_status_sigusr1_writes_the_stacks(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "finetune_0.rank1")
    os.kill(os.getpid(), signal.SIGUSR1)
    stacks = tmp_path / "finetune_0" / "stacks.rank1.txt"
    until(lambda: "test_status_sigusr1_writes_the_stacks" in stacks.read_text())
    status.close()


def test_status_unwritable_folder_does_not_stop_the_role(tmp_path: Path) -> None:
    status = RoleStatus(tmp_path, "actor_0")
    (tmp_path / "status" / "actor_0.json").unlink()
    (tmp_path / "status").rmdir()
    status.progress(step=1)
    status.close()


@pytest.mark.parametrize("text", ["null", "1", '"x"', "[]", "{", "{}", ""])
def test_damaged_status_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "status").mkdir()
    (tmp_path / "status" / "actor_0.json").write_text(text)
    assert read_statuses(tmp_path) == {}
