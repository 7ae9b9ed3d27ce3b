"""The YAML files and docs/configuration.md say about every key what its declaration says."""

from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config import docs
from pipelinerl.config.keys import declared
from pipelinerl.config.load import CONF_DIR, compose
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
