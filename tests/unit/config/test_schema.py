"""The schema of YAML files: every shipped experiment fits, and a wrong key or value does not."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipelinerl.config.schema import json_schema

CONF = Path(__file__).resolve().parents[3] / "conf"
SCHEMA = jsonschema.Draft202012Validator(json_schema())


def wrong(content: dict[str, Any]) -> list[str]:
    return [".".join(map(str, error.path)) for error in SCHEMA.iter_errors(content)]


def test_the_file_beside_the_configurations_is_what_make_format_writes() -> None:
    assert json.loads((CONF / "schema.json").read_text()) == json_schema()


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_experiments_fit_the_schema(path: Path) -> None:
    text = path.read_text()
    assert text.splitlines()[1] == "# yaml-language-server: $schema=schema.json"
    assert wrong(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"attempts": "many"}, "attempts"),
        ({"attempts": 0}, "attempts"),
        ({"atempts": 8}, ""),
        ({"finetune": {"dtype": "float8"}}, "finetune.dtype"),
        ({"finetune": {"rl": {"epsilom_low": 0.2}}}, "finetune.rl"),
        ({"finetune": [1]}, "finetune"),
    ],
)
def test_wrong_keys_and_values_do_not_fit(content: dict[str, Any], where: str) -> None:
    assert wrong(content) == [where]


def test_a_value_may_be_an_interpolation_and_no_key_is_required() -> None:
    assert wrong({"attempts": "${seed}", "defaults": ["base", "_self_"], "hydra": {"run": {"dir": "."}}}) == []
    assert wrong({}) == []
