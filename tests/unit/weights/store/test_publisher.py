"""Which files of a store stay, and who may sign a manifest."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.weights.protocol import ParamSpec, PayloadRange
from pipelinerl.weights.store.files import FolderFiles
from pipelinerl.weights.store.manifest import NAME, StoreError, sealed, unsealed
from pipelinerl.weights.store.publisher import Published, PublishedFiles, Publisher
from tests.says import says

SPECS = (ParamSpec("w", "uint8", (64,)),)


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def publisher(
    folder: Path, *, keep: int = 2, grace_s: float = 0.0, secret: str = "s", sender: str = "run"
) -> Publisher:
    return Publisher(FolderFiles(folder), secret=secret, sender=sender, keep=keep, grace_s=grace_s)


def publish(one: Publisher, folder: Path, version: int, *, base: int | None = None, num_bytes: int = 64) -> str:
    """Publish a version of one rank. Returns the file's name."""
    kind = "whole" if base is None else "delta"
    file = FolderFiles(folder).put(f"{one.prefix}-{version}-0.{kind}", memoryview(bytes(num_bytes)))
    one.wrote([file.name])
    one.publish(version, SPECS, (PayloadRange(start=0, end=num_bytes, file=file),), base)
    return file.name


def newest(folder: Path, secret: str = "s"):
    return unsealed((folder / NAME).read_bytes(), secret)


def test_two_thousand_versions_take_the_room_of_the_kept_ones(tmp_path: Path) -> None:
    one = publisher(tmp_path)
    for version in range(2000):
        publish(one, tmp_path, version)
        one.clean(())
        assert len(list(tmp_path.glob("*.whole"))) <= 2
    assert sorted(path.name for path in tmp_path.iterdir() if "-1998-" in path.name or "-1999-" in path.name)
    assert len(list(tmp_path.iterdir())) == 4  # two versions, the list of parameters, the manifest


def test_version_that_a_server_reads_stays_until_it_has_read_it(tmp_path: Path) -> None:
    one = publisher(tmp_path, keep=1)
    first = publish(one, tmp_path, 0)
    reading = newest(tmp_path).key
    for version in range(1, 5):
        publish(one, tmp_path, version)
        one.clean({reading})
    assert (tmp_path / first).exists()
    assert len(list(tmp_path.glob("*.whole"))) == 2
    one.clean(())
    assert not (tmp_path / first).exists()


def test_whole_version_stays_while_differences_lead_on_from_it(tmp_path: Path) -> None:
    one = publisher(tmp_path, keep=1)
    first = publish(one, tmp_path, 0)
    for version in range(1, 9):
        assert one.extends(version, version - 1, [(0, 8)])
        publish(one, tmp_path, version, base=version - 1, num_bytes=8)
        one.clean(())
    assert (tmp_path / first).exists()
    assert [step.version for step in newest(tmp_path).steps_from((1, 0, 6))] == [7, 8]
    assert [step.version for step in newest(tmp_path).steps_from(None)] == list(range(9))
    assert [step.version for step in newest(tmp_path).steps_from((2, 0, 6))] == list(range(9))
    assert not one.extends(9, 8, [(0, 8)]), "the differences would be larger than a whole version"
    assert not one.extends(9, 7, [(0, 1)]), "it does not follow from what is published"


def test_64_versions_are_the_most_that_a_late_server_applies(tmp_path: Path) -> None:
    one = publisher(tmp_path)
    publish(one, tmp_path, 0)
    for version in range(1, 64):
        assert one.extends(version, version - 1, [(0, 1)])
        publish(one, tmp_path, version, base=version - 1, num_bytes=1)
    assert not one.extends(64, 63, [(0, 1)])


def test_files_of_a_former_process_go_when_they_have_been_replaced(tmp_path: Path) -> None:
    publish(publisher(tmp_path, sender="a"), tmp_path, 3)
    (tmp_path / ".g1-01234567-4-0.whole.77").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    second = publisher(tmp_path, sender="b")
    second.clean(())
    assert newest(tmp_path).sender == "a.0", "until there is a newer version, the former one stays"
    for version in (3, 4):
        publish(second, tmp_path, version)
    second.clean(())
    names = {path.name for path in tmp_path.iterdir()}
    assert {name for name in names if not name.startswith(second.prefix)} == {NAME, "notes.txt"}
    assert newest(tmp_path).order == (2, 0, 4)


def test_files_stay_for_the_grace_after_they_were_replaced() -> None:
    shelved = PublishedFiles()
    for number in range(3):
        shelved.replace(Published(str(number), frozenset({f"f{number}"})), float(number))
    assert shelved.removable((), keep=1, grace_s=5.0, now=5.5) == frozenset()
    assert shelved.removable((), keep=1, grace_s=5.0, now=6.0) == {"f0"}
    assert shelved.removable(("1",), keep=1, grace_s=5.0, now=60.0) == {"f0"}
    assert shelved.removable((), keep=1, grace_s=5.0, now=60.0) == {"f0", "f1"}


def test_manifest_of_another_secret_is_refused_and_replaced(tmp_path: Path) -> None:
    publish(publisher(tmp_path, secret="theirs"), tmp_path, 7)
    with pytest.raises(StoreError, match=says("not signed", "secret")):
        newest(tmp_path)
    publish(publisher(tmp_path), tmp_path, 0)
    assert newest(tmp_path).order == (1, 0, 0)


def test_manifest_whose_steps_do_not_follow_is_refused(tmp_path: Path) -> None:
    publish(publisher(tmp_path), tmp_path, 0)
    broken: Any = msgspec.to_builtins(newest(tmp_path))
    broken["steps"] = 2 * tuple(broken["steps"])
    with pytest.raises(StoreError, match="does not follow"):
        unsealed(sealed(broken, "s"), "s")
