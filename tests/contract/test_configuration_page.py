"""docs/configuration.md names every key, no other, each with its default."""

import re
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.load import CONF_DIR, compose, config_keys
from pipelinerl.config.sections import TinyModelSection

PAGE = CONF_DIR.parent / "docs" / "configuration.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (.+) \|$", re.MULTILINE)
REQUIRED = "required"
NO_DEFAULT = "–"


@pytest.fixture(scope="module")
def base() -> DictConfig:
    return compose("base")


@pytest.fixture(scope="module")
def rows() -> dict[str, tuple[str, str]]:
    found = ROW.findall(PAGE.read_text())
    assert len({key for key, _, _ in found}) == len(found), "a key has two rows"
    return {key: (default, meaning) for key, default, meaning in found}


def leaves() -> set[str]:
    keys = config_keys()
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    return (set(keys) - sections) | {"tiny_model"} | {f"tiny_model.{name}" for name in TinyModelSection.model_fields}


def raw_default(base: DictConfig, key: str) -> Any:
    """The value in the YAML files, interpolations as they are written."""
    value: Any = OmegaConf.to_container(base, resolve=False)
    for part in key.split("."):
        value = value[part]
    return value


def test_page_names_every_key_and_no_other(rows):
    assert set(rows) == leaves()


def test_page_gives_the_defaults(rows, base):
    wrong = {}
    for key, (cell, _) in rows.items():
        if cell == NO_DEFAULT:
            assert key.startswith("tiny_model.")
            continue
        value = raw_default(base, key)
        documented = "???" if cell == REQUIRED else yaml.safe_load(cell.strip("`"))
        if documented != value:
            wrong[key] = (documented, value)
    assert wrong == {}


def test_page_explains_every_key(rows):
    assert [key for key, (_, meaning) in rows.items() if len(meaning) < 4] == []
