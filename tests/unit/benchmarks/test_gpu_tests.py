"""The check of a GPU keeps the results of every module, whatever happens to the others."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import gpu_tests
from tests.says import says

GOOD = (
    "import pytest\n\n@pytest.mark.gpu\ndef test_it(): pass\n\n@pytest.mark.gpu\ndef test_not(): pytest.skip('why')\n"
)
CRASHES = "import os, pytest\n\n@pytest.mark.gpu\ndef test_it(): os._exit(9)\n"


def test_quick_modules_come_first_and_none_is_left_out() -> None:
    found = [path.stem for path in gpu_tests.modules()]
    assert found[:2] == ["test_receiver_gpu", "test_bucket_transport_gpu"]
    assert sorted(found) == sorted(path.stem for path in gpu_tests.FOLDER.glob("test_*.py"))
    assert {f"test_{name}_gpu" for name in gpu_tests.QUICK_FIRST} == set(found)


@pytest.mark.parametrize("plugins", ["installed", "missing"])
def test_a_module_that_crashes_costs_only_its_own_results(
    tmp_path: Path, plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plugins == "missing":
        monkeypatch.setattr(gpu_tests, "PLUGINS", ("no_such_plugin",))
    paths = [tmp_path / "test_crashes.py", tmp_path / "test_good.py"]
    for path, text in zip(paths, (CRASHES, GOOD), strict=True):
        path.write_text(text)
    results = gpu_tests.run_all(paths, tmp_path / "out" / "found.json", 250)
    assert [(result["module"], result["outcome"]) for result in results] == [
        ("test_crashes", "error"),
        ("test_good", "passed"),
        ("test_good", "skipped"),
    ]
    assert results[0]["reason"] == "pytest ended with 9"
    assert json.loads((tmp_path / "out" / "found.json").read_text())["results"] == results


def test_a_module_for_which_no_time_is_left_is_named(tmp_path: Path) -> None:
    path = tmp_path / "test_good.py"
    path.write_text(GOOD)
    [result] = gpu_tests.run_all([path], tmp_path / "found.json", 0.01)
    assert result["outcome"] == "error"
    assert re.search(says("not end", "0 s"), result["reason"])
