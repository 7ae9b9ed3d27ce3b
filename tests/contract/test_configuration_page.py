"""The YAML files and docs/configuration.md say about every key what its declaration says."""

import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config import docs
from pipelinerl.config.keys import declared
from pipelinerl.config.load import CONF_DIR, compose, parse
from pipelinerl.config.sections import Config

PAGE = CONF_DIR.parent / "docs" / "configuration.md"


def test_files_are_those_that_the_declarations_make():
    assert [str(path) for path, _ in docs.stale(docs.pages())] == [], "run `make format`"


def test_composed_base_has_the_declared_defaults():
    """Hydra's composition, not the generator, is compared: the files of the groups and their order count."""
    composed: Any = OmegaConf.to_container(compose("base"), resolve=False)
    wrong = {}
    for key in declared(Config):
        value = composed
        for part in key.name.split("."):
            value = value[part]
        if value != key.default:
            wrong[key.name] = (key.default, value)
    assert wrong == {}


def test_every_key_is_explained():
    page = PAGE.read_text()
    for key in declared(Config):
        assert len(key.meaning) > 1, key.name
        assert not key.meaning.endswith("."), key.name
        assert f"| `{key.name}` | {key.type} |" in page


def rows(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its first two lines."""
    lines = page.read_text().partition(heading)[2].partition("\n## ")[0].splitlines()
    cells = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in cells[2:]]


def test_first_ten_keys_exist():
    names = {key.name for key in declared(Config)} | {
        "vllm_config.vllm_kwargs.max_model_len",
        "llm.parameters.max_tokens",
    }
    table = rows(PAGE, "## The ten keys")
    assert len(table) == 10
    written = {name for row in table for name in re.findall(r"`([\w.]+)`", row[1])}
    assert written - names == set()


def test_keys_of_every_named_objective_make_a_valid_configuration():
    table = rows(PAGE.parent / "objectives.md", "## Which keys make which algorithm")
    assert {row[0].split(" ")[0] for row in table} >= {"GRPO", "DAPO", "Dr.", "GSPO", "CISPO", "RLOO", "PPO"}
    for name, keys in table:
        overrides = [word for code in re.findall(r"`([^`]+)`", keys) for word in code.split()]
        assert overrides, name
        required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
        parse(compose("base", [*required, *overrides]))
