"""The table of supported versions: it holds what is installed here, and finds what is missing."""

import re
import tomllib
from pathlib import Path

import pytest

from pipelinerl.config import versions
from pipelinerl.config.versions import SUPPORTED, SupportedLibrary, missing_names, series, unsupported

ROOT = Path(__file__).parents[3]


def test_what_is_installed_here_is_in_the_table() -> None:
    assert unsupported() == []


def test_what_the_package_requires_was_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(
        requirement.split("==")
        for requirement in [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
        if "==" in requirement
    )
    pinned = {name: series(number) for name, number in pins.items() if name in SUPPORTED}
    assert pinned.keys() == {"torch", "deepspeed", "vllm"}
    assert all(number in SUPPORTED[name].tested for name, number in pinned.items())


def test_a_series_that_nobody_tried_is_named_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(versions.SUPPORTED, "torch", SupportedLibrary(tested=("1.0",), read=("1.1",)))
    [line] = unsupported()
    assert line.startswith("torch 2.13")
    assert line.endswith("1.0, 1.1")


def test_names_that_a_library_lacks_are_found_wherever_they_are_imported(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "from json import dumps\nfrom importlib import metadata\n"
        "def later():\n    from json import no_such_name\n    from json.no_such_module import name\n    import json\n"
        "from pathlib import no_such_path\n"
        "try:\n    from json.new_place import loads\nexcept ImportError:\n    from json import loads\n"
        "try:\n    from json.new_place import lost\nexcept ImportError:\n    from json import lost\n"
    )
    assert [line.partition(":")[0] for line in missing_names(["json", "importlib"], tmp_path)] == [
        "json.no_such_name",
        "json.new_place.lost",
        "json.no_such_module.name",
    ]


def test_everything_that_is_imported_from_msgspec_exists() -> None:
    assert missing_names(["msgspec"]) == []


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "installing.md").read_text()
    for name, library in SUPPORTED.items():
        [row] = [line for line in page.splitlines() if line.lower().startswith(f"| {name} |")]
        assert re.findall(r"\d+\.\d+", row) == [*library.tested, *library.read]
