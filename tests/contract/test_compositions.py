"""What tests compose is what Hydra composes: values, flags and errors."""

from typing import Any

import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig

from pipelinerl.config.paths import CONF_DIR
from pipelinerl.config.search import set_search_path
from tests import compositions


def described(node: Any) -> Any:
    """A node with the flags of everything in it, nothing resolved."""
    if isinstance(node, DictConfig) and not node._is_interpolation() and not node._is_none():
        return {name: described(node._get_node(name)) for name in node} | {None: node._metadata.flags}
    return repr(node), node._metadata.flags


def outcome(compose: Any, name: str, overrides: list[str]) -> Any:
    try:
        return described(compose(name, overrides=overrides))
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("quickstart", ["finetune=gspo", "finetune.rl.epsilon=.3", "++llm.parameters.x=[1,2]", "output_dir=/x"]),
        ("base", ["finetune.learnin_rate=1", "~seed"]),
        ("base", ["finetune=nope"]),
        ("base", ["finetune.learning_rate=1,2"]),
        ("nope", []),
    ],
)
def test_composition_of_tests_is_that_of_hydra(name: str, overrides: list[str]) -> None:
    set_search_path(own=False)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        assert outcome(compositions.compose, name, overrides) == outcome(compositions.compose_anew, name, overrides)


def test_composition_is_the_test_s_own() -> None:
    set_search_path(own=False)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        first = compositions.compose("base")
        first.seed = 12345
        assert compositions.compose("base").seed != 12345
