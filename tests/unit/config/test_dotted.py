"""A copy of one of PipelineRL's domains that imports itself by its old name is told what to write."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.config.dotted import resolve_function, self_imports
from pipelinerl.errors import ConfigError
from tests.says import says


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    package = tmp_path / "my_copied_domain"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.startswith("my_copied_domain")]:
        del sys.modules[name]


def test_import_of_a_domain_that_is_not_here_is_named_with_place_and_new_name(copy: Path) -> None:
    (copy / "rollouts.py").write_text("import json\nfrom pipelinerl.domains.ifeval.checks import check\n")
    with pytest.raises(
        ConfigError, match=says("rollouts.py:2", "write `my_copied_domain` for `pipelinerl.domains.ifeval`")
    ):
        resolve_function("my_copied_domain.rollouts.generate")


def test_import_of_a_domain_of_the_same_name_here_is_found_although_it_works(copy: Path) -> None:
    """`pipelinerl.domains.coding.sandbox` would be the project's own, which is another task."""
    (copy / "sandbox.py").write_text("")
    (copy / "rollouts.py").write_text(
        "from pipelinerl.domains.coding.sandbox import run\n"
        "from pipelinerl.domains.math import RewardTable\n"
        "from my_copied_domain.sandbox import run\n"
    )
    (line,) = self_imports("my_copied_domain.rollouts.generate")
    assert re.search(
        says(f"{copy}/rollouts.py:1", "pipelinerl.domains.coding.sandbox", "my_copied_domain.sandbox"), line
    )
    assert list(self_imports("pipelinerl.domains.largest.generate_rollout")) == []


def test_import_of_a_domain_whose_module_a_neighbour_is_named_after_is_no_copy(copy: Path) -> None:
    (copy / "tools").mkdir()
    (copy / "task").mkdir()
    (copy / "task/domain.py").write_text("from pipelinerl.domains.libraries.tools import answer_with_tools\n")
    assert list(self_imports("my_copied_domain.task.domain.generate")) == []
