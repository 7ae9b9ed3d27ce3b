"""What the command `members` shows and asks for."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from pipelinerl.errors import ConfigError
from pipelinerl.inspect.members import ask_to_leave, look_twice, store_of, table_of
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import FolderStore
from tests.says import says


def test_lease_that_is_not_renewed_meanwhile_is_told_from_one_that_is(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    quiet = Lease(name="actor_0", incarnation="a", ttl_s=9, state="ready")
    lively = Lease(
        name="actor_llm_3", incarnation="b", ttl_s=9, url="http://[fd00::1]:1", capacity=64, serves=1, version="7"
    )
    store.overwrite(quiet)
    store.overwrite(lively)
    looked = look_twice(store, lambda _: store.overwrite(Lease(**{**_fields(lively), "sequence": 1})))
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table_of(*looked))
    lines = [line for line in console.export_text().splitlines() if "actor" in line]
    assert "not renewed for 2.5 s" in lines[0]
    assert [text in lines[1] for text in ("held", "starting", "64", "7", "http://[fd00::1]:1")] == [True] * 5


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


def _fields(lease: Lease) -> dict:
    return {name: getattr(lease, name) for name in lease.__struct_fields__}


@pytest.mark.parametrize("name", ["finetune_0", "verifier_1", "launcher_1"])
def test_only_servers_of_a_model_are_asked_to_leave(tmp_path: Path, name: str) -> None:
    """The others do not read the request, and the command said that they end."""
    store = FolderStore(tmp_path)
    store.overwrite(Lease(name=name, incarnation="i", ttl_s=5.0))
    with pytest.raises(ConfigError, match=says(repr(name), "actor_llm", "preprocessor_llm")):
        ask_to_leave(store, name)
    assert not store.is_asked_to_leave(name)
