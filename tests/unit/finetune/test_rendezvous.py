"""The ranks' store and messages: no port for one node, one address for several, nothing forged is believed."""

import gc
import os
import pickle
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from pipelinerl.finetune import rendezvous
from pipelinerl.finetune.rendezvous import ForgedError, SealedStore, open_rendezvous, seal, unseal
from pipelinerl.world.network import find_port_block, listen_address
from tests.says import says

SECRET = b"s" * 16


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SECRET", SECRET.decode())
    monkeypatch.delenv("PIPELINERL_RANKS_FILE", raising=False)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_open_store_of_ranks_on_one_node_opens_no_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    before = listening()
    assert isinstance(open_rendezvous(0, 1, 5.0), dist.HashStore)
    monkeypatch.setenv("PIPELINERL_RANKS_FILE", str(tmp_path / "ranks"))
    first, second = (open_rendezvous(rank, 2, 5.0) for rank in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert listening() == before


def test_open_store_of_several_nodes_listens_on_one_address_and_refuses_what_a_stranger_wrote(
    monkeypatch: pytest.MonkeyPatch,
):
    port = find_port_block("127.0.0.1", 1)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = listening()
    first, second = open_rendezvous(0, 2, 5.0), open_rendezvous(1, 2, 5.0)
    assert listening() - before == {("127.0.0.1", port)}
    first.set("address", b"\x00rank 0")
    assert second.get("address") == b"\x00rank 0"
    stranger = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
    stranger.set("address", pickle.dumps(print))
    with pytest.raises(ForgedError, match=says("address", "rank", "run")):
        second.get("address")
    first.set("other", "value")
    stranger.set("address", stranger.get("other"))
    with pytest.raises(ForgedError):  # a sealed value does not pass for another key
        second.get("address")


def test_sealed_store_has_what_process_groups_use():
    store = SealedStore(dist.HashStore(), SECRET)
    store.set_timeout(timedelta(seconds=5))
    store.set("a", "1")
    store.wait(["a"])
    store.wait(["a"], timedelta(seconds=1))
    assert (store.get("a"), store.check(["a"]), store.check(["b"])) == (b"1", True, False)
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert store.num_keys() == 2
    assert store.delete_key("a")


def test_sealed_store_can_be_cloned_as_process_groups_do():
    store = SealedStore(dist.HashStore(), SECRET)
    held = dist.PrefixStore("group/", store)
    copy = held.clone()  # type: ignore[attr-defined]
    gc.collect()
    held.set("a", "1")
    assert (held.get("a"), copy.get("a")) == (b"1", b"1")


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 40, seal(b"content", b"t" * 16, "object")])
def test_unseal_refuses_what_another_secret_sealed(wrong: bytes):
    assert unseal(seal(b"content", SECRET, "object"), SECRET, "object") == b"content"
    with pytest.raises(ForgedError):
        unseal(wrong, SECRET, "object")


def test_objects_of_a_stranger_are_not_unpickled(tmp_path: Path):
    class Trap:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "trapped"),)

    with pytest.raises(ForgedError):
        rendezvous._opened(seal(pickle.dumps(Trap()), b"t" * 16, "object"))
    assert not (tmp_path / "trapped").exists()


def test_listen_address_is_the_nodes_own_or_every_one():
    assert listen_address("127.0.0.1") == "127.0.0.1"
    assert listen_address("192.0.2.1") == ""  # of no interface
    assert listen_address("no-such-host.invalid") == ""
    assert listen_address("localhost") == ""  # a name that leads to loopback is no address for others
    for address in {e.address for es in psutil.net_if_addrs().values() for e in es if e.family == socket.AF_INET}:
        assert listen_address(address) == address
