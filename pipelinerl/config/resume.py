"""Whether a configuration continues the run in a folder: only keys declared with `may_change` may differ."""

from collections.abc import Iterable, Mapping
from typing import Any

from pipelinerl.config.keys import optional_subsection, subsection
from pipelinerl.config.sections import Config, Section
from pipelinerl.config.variables import without_secrets

OF_ONE_LAUNCH = {"force_restart": False, "resume": "streams"}
"""Keys about one launch, with the values with which it continues the folder's run."""


def asked_once(config: Config) -> list[str]:
    """What was asked of this launch alone, as the command line says it. The same command would do it again."""
    asked = {key: getattr(config, key) for key in OF_ONE_LAUNCH}
    return [f"{key}={str(value).lower()}" for key, value in asked.items() if value != OF_ONE_LAUNCH[key]]


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings that differ and make it another experiment: key, old value, new value. Where secrets are does not."""
    before, after = dict(_flatten(without_secrets(old))), dict(_flatten(without_secrets(new)))
    absent = "absent"
    keys = sorted(key for key in before.keys() | after.keys() if not may_change(key))
    pairs = [(key, before.get(key, absent), after.get(key, absent)) for key in keys]
    return [(key, was, now) for key, was, now in pairs if was != now]


def may_change(key: str) -> bool:
    """Whether a resumed run may change a dotted key. What lies within a mapping follows the mapping's key."""
    section: type[Section] = Config
    for part in key.split("."):
        field = section.model_fields.get(part)
        if field is None:
            return False
        inner = subsection(field) or optional_subsection(field)
        if inner is None:
            extra = field.json_schema_extra
            return isinstance(extra, dict) and bool(extra["may_change"])
        section = inner
    return False


def _flatten(section: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
