"""What `status` shows of a run's leases, and which server it asks to leave."""

from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.inspect.status import ask_to_leave, main, member_lines, store_of
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import FolderStore
from tests.run_folder import write_config
from tests.says import says


def test_leases_have_a_row_each(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    assert member_lines(store) == []
    store.overwrite(Lease(name="actor_0", incarnation="a", ttl_s=9, state="ready"))
    server = {"url": "http://[fd00::1]:1", "capacity": 64, "serves": 1, "version": "7"}
    store.overwrite(Lease(name="actor_llm_3", incarnation="b", ttl_s=9, **server))
    empty, header, actor, llm = member_lines(store)
    assert (empty, header.split()) == ("", ["member", "lease", "rollouts", "serves", "weights", "address"])
    assert actor.split() == ["actor_0", "ready"]
    assert llm.split() == ["actor_llm_3", "starting", "64", "1", "7", "http://[fd00::1]:1"]


def test_status_asks_a_server_to_leave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path)
    store = FolderStore(tmp_path)
    store.overwrite(Lease(name="actor_llm_3", incarnation="b", ttl_s=9))
    assert main([str(tmp_path), "--leave", "actor_llm_3"]) == 0
    assert "actor_llm_3 is asked to leave" in capsys.readouterr().out
    assert store.is_asked_to_leave("actor_llm_3")


def test_only_a_member_can_be_asked_to_leave(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.overwrite(Lease(name="actor_llm_3", incarnation="b", ttl_s=9))
    with pytest.raises(ConfigError, match=says("'actor_llm_4'", "lease", "'actor_llm_3'")):
        ask_to_leave(store, "actor_llm_4")
    ask_to_leave(store, "actor_llm_3")
    assert store.is_asked_to_leave("actor_llm_3")


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says(tmp_path, "run folder")):
        store_of(str(tmp_path))


@pytest.mark.parametrize("name", ["finetune_0", "verifier_1", "launcher_1"])
def test_only_servers_of_a_model_are_asked_to_leave(tmp_path: Path, name: str) -> None:
    """The others do not read the request, and the command said that they end."""
    store = FolderStore(tmp_path)
    store.overwrite(Lease(name=name, incarnation="i", ttl_s=5.0))
    with pytest.raises(ConfigError, match=says(repr(name), "actor_llm", "preprocessor_llm")):
        ask_to_leave(store, name)
    assert not store.is_asked_to_leave(name)
