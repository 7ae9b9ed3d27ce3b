"""Checks before a start: packages that another build of torch was made for."""

import os
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.launcher.preflight import check_companions


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, with a CPU build of torch."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    describe(tmp_path, "torch", "2.13.0+cpu")
    return tmp_path


def describe(folder: Path, package: str, version: str) -> None:
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def write(folder: Path, package: str, version: str, code: str) -> None:
    describe(folder, package, version)
    (folder / f"{package}.py").write_text(code)


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


def test_torchvision_that_cannot_be_loaded_is_refused_with_what_to_remove(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0", BROKEN)
    with pytest.raises(
        ConfigError, match=r"torchvision cannot be loaded beside torch 2.13.0\+cpu .*nms.*pip uninstall"
    ):
        check_companions()


def test_torchvision_of_another_kind_that_loads_passes(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0a1", "")
    check_companions()


def test_torchvision_of_the_same_kind_is_not_loaded(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0+cpu", BROKEN)
    check_companions()
