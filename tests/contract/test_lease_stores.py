"""Both stores of leases keep one contract."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import FolderStore, LeaseStore, RedisStore, StoreAwayError, StoreRefusedError

MINE = Lease(name="actor_llm_3", incarnation="mine", ttl_s=5.0)
THEIRS = Lease(name="actor_llm_3", incarnation="theirs", ttl_s=5.0)


@pytest.fixture(params=["folder", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path, redis_options: dict[str, Any] | None) -> LeaseStore:
    if request.param == "folder":
        return FolderStore(tmp_path)
    if redis_options is None:
        pytest.skip("needs redis-server")
    return RedisStore({"host": "127.0.0.1"} | redis_options, tmp_path.name)


def renewed(lease: Lease, sequence: int = 1) -> Lease:
    return msgspec.structs.replace(lease, sequence=sequence)


def test_claim_succeeds_once(store: LeaseStore) -> None:
    assert store.leases() == {}
    assert store.claim(MINE)
    assert not store.claim(THEIRS)
    assert store.leases() == {"actor_llm_3": MINE}


def test_renewal_of_the_holder_is_seen_and_another_ones_is_refused(store: LeaseStore) -> None:
    store.overwrite(MINE)
    assert store.renew(renewed(MINE))
    assert not store.renew(renewed(THEIRS, 9))
    assert store.leases() == {"actor_llm_3": renewed(MINE)}


def test_newer_process_takes_the_name_over(store: LeaseStore) -> None:
    store.overwrite(MINE)
    store.overwrite(THEIRS)
    assert not store.renew(renewed(MINE))
    store.remove(MINE)
    assert store.leases() == {"actor_llm_3": THEIRS}


def test_deleted_lease_comes_back_with_the_next_renewal(store: LeaseStore) -> None:
    store.overwrite(MINE)
    store.remove(MINE)
    assert store.leases() == {}
    assert store.renew(renewed(MINE))
    assert store.leases() == {"actor_llm_3": renewed(MINE)}


def test_request_to_leave_is_for_one_process(store: LeaseStore) -> None:
    store.overwrite(MINE)
    assert not store.is_asked_to_leave(MINE.name)
    store.ask_to_leave(MINE.name)
    assert store.is_asked_to_leave(MINE.name)
    store.overwrite(THEIRS)
    assert not store.is_asked_to_leave(MINE.name)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"name": "actor_llm_9"}', b'{"name": "../../etc_0"}'])
def test_what_is_no_lease_of_that_name_is_nobodys(tmp_path: Path, content: bytes) -> None:
    store = FolderStore(tmp_path)
    store.overwrite(MINE)
    (tmp_path / "members" / "actor_llm_4.json").write_bytes(content)
    (tmp_path / "members" / "actor_llm_5.json").write_bytes(msgspec.json.encode(MINE))
    assert store.leases() == {"actor_llm_3": MINE}


def test_store_that_is_away_says_so(tmp_path: Path) -> None:
    away: list[Callable[[], Any]] = [
        RedisStore({"host": "127.0.0.1", "port": 1}, "r").leases,
        lambda: FolderStore(tmp_path / "file").overwrite(MINE),
    ]
    (tmp_path / "file").write_text("not a folder")
    for call in away:
        with pytest.raises(StoreAwayError):
            call()


def test_redis_that_refuses_the_password_says_so(redis_options: dict[str, Any] | None) -> None:
    if redis_options is None:
        pytest.skip("needs redis-server")
    stranger = RedisStore({"host": "127.0.0.1"} | redis_options | {"password": "guessed"}, "r")
    with pytest.raises(StoreRefusedError, match="refuses the password"):
        stranger.leases()
