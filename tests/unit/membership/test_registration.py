"""A role's own lease and its view of the others, with real threads and a store in a folder."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl.membership.lease import PROTOCOL, Lease
from pipelinerl.membership.registration import Registration, pause_s
from pipelinerl.membership.stores import FolderStore, StoreAwayError
from pipelinerl.membership.watch import MembershipWatch

DEADLINE_S = 60.0
TTL_S = 0.4


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


@pytest.fixture
def register(store: FolderStore) -> Iterator[Callable[..., Registration]]:
    started: list[Registration] = []

    def make(incarnation: str = "a", **arguments) -> Registration:
        settings = {"life": time.monotonic, "on_taken": lambda: None} | arguments
        started.append(Registration(store, Lease(name="actor_llm_0", incarnation=incarnation, ttl_s=TTL_S), **settings))
        return started[-1]

    yield make
    for registration in started:
        registration.close()


def test_lease_is_renewed_four_times_in_its_length_and_every_two_seconds_at_least() -> None:
    assert [pause_s(ttl_s) for ttl_s in (2.0, 8.0, 60.0)] == [0.5, 2.0, 2.0]


def test_lease_is_renewed_while_the_role_lives_and_given_back_at_the_end(store, register) -> None:
    registration = register()
    until(lambda: store.leases() and store.leases()["actor_llm_0"].sequence >= 4)
    registration.close()
    assert store.leases() == {}


def test_role_without_a_sign_of_life_is_seen_as_gone(store, register) -> None:
    watch = MembershipWatch(store, ())
    try:
        has_ended = threading.Event()
        register(life=lambda: 0.0 if has_ended.is_set() else time.monotonic()).update(state="ready", url="http://a:1")
        until(lambda: "actor_llm_0" in watch.servers("actor_llm"))
        has_ended.set()
        until(lambda: "actor_llm_0" not in watch.servers("actor_llm"))
    finally:
        watch.close()


def test_role_of_another_protocol_is_named(store, caplog: pytest.LogCaptureFixture) -> None:
    store.renew(Lease(name="actor_llm_7", incarnation="old", ttl_s=60, url="http://a:1", protocol=PROTOCOL - 1))
    MembershipWatch(store, ()).close()
    assert f"event=member_not_used name=actor_llm_7 protocol={PROTOCOL - 1} ours={PROTOCOL}" in caplog.messages


def test_changes_are_seen_at_once(store, register) -> None:
    registration = register(life=lambda: 0.0)
    registration.update(state="ready", version="7")
    until(lambda: store.leases().get("actor_llm_0") is not None and store.leases()["actor_llm_0"].version == "7")


def test_last_change_is_awaited_and_stays_for_others_to_read(store, register) -> None:
    registration = register(life=lambda: 0.0)
    registration.update(version="last")
    assert registration.wait_until_written(DEADLINE_S)
    assert store.leases()["actor_llm_0"].version == "last"
    registration.close(removes=False)
    assert store.leases()["actor_llm_0"].version == "last"


def test_change_that_a_store_does_not_take_is_not_written(store, register, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise StoreAwayError("away")

    monkeypatch.setattr(store, "overwrite", away)
    registration = register()
    registration.update(version="last")
    assert not registration.wait_until_written(2 * TTL_S)


def test_process_whose_place_is_taken_is_told(store, register) -> None:
    told: list[bool] = []
    register("old", on_taken=lambda: told.append(True))
    until(lambda: bool(store.leases()))
    register("new")
    until(lambda: told == [True])
    until(lambda: store.leases()["actor_llm_0"].incarnation == "new")


def test_member_learns_that_it_should_leave(store, register) -> None:
    registration = register()
    until(lambda: bool(store.leases()))
    store.ask_to_leave("actor_llm_0")
    until(lambda: registration.is_asked_to_leave)


def test_store_that_is_away_ends_nothing(store, register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.membership.lease.MAX_STEP_S", TTL_S / 20)  # of a late look: far less than a lease
    watch = MembershipWatch(store, ())
    try:
        register().update(state="ready", url="http://a:1")
        until(lambda: "actor_llm_0" in watch.servers("actor_llm"))

        def away(*_: object) -> None:
            raise StoreAwayError("away")

        with monkeypatch.context() as patch:
            for name in ("leases", "renew", "overwrite", "is_asked_to_leave"):
                patch.setattr(store, name, away)
            deadline = time.monotonic() + 4 * TTL_S
            while time.monotonic() < deadline:
                assert "actor_llm_0" in watch.servers("actor_llm")
                time.sleep(0.02)
        before = store.leases()["actor_llm_0"].sequence
        until(lambda: store.leases()["actor_llm_0"].sequence > before)
        assert "actor_llm_0" in watch.servers("actor_llm")
    finally:
        watch.close()
