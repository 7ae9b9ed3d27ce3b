"""`pipelinerl schema > conf/schema.json`: the JSON schema of an experiment's YAML file, for editors.

It says what `config.sections` declares. A file holds a part of the keys, so none is required, and each value may be an
interpolation (`${seed}`).
"""

import argparse
import json
from typing import Any

from pipelinerl.config.keys import REQUIRED
from pipelinerl.config.names import ENGINES
from pipelinerl.config.sections import Config

INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
BESIDE = {
    "defaults": {"type": "array", "description": "the configurations that this one builds on, in this order"},
    "hydra": {"type": "object", "description": "Hydra's own settings"},
    **{name: {"type": "boolean", "description": "PipelineRL's choice of `finetune.engine`"} for name in ENGINES},
}
"""What a file may hold beside the keys."""


def json_schema() -> dict[str, Any]:
    """The schema of an experiment's YAML file."""
    schema = Config.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
        part["properties"] = {name: _in_a_file(value) for name, value in part["properties"].items()}
    schema["properties"] |= BESIDE
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _in_a_file(declared: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in declared:
        return declared
    said = {name: declared[name] for name in ("description", "default") if declared.get(name, REQUIRED) != REQUIRED}
    value = {name: entry for name, entry in declared.items() if name not in (*said, "may_change", "title", "default")}
    return said | {"anyOf": [value, INTERPOLATION]}


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="pipelinerl schema", description="JSON schema of an experiment's YAML file"
    ).parse_args()
    print(json.dumps(json_schema(), ensure_ascii=False))
