"""Dotted keys and texts in a configuration of plain nested mappings, which is never changed in place."""

from collections.abc import Callable, Mapping
from typing import Any

ABSENT = object()
"""A default of ``value_at`` that is no value of any key."""


def value_at(container: Any, key: str, default: Any = None) -> Any:
    """The value of a dotted key, or ``default``."""
    for part in key.split("."):
        if not isinstance(container, Mapping) or part not in container:
            return default
        container = container[part]
    return container


def with_settings(container: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with these dotted keys changed."""
    changed = dict(container)
    for key, value in settings.items():
        *sections, last = key.split(".")
        inside = changed
        for section in sections:
            inner = inside.get(section)
            inside[section] = inside = dict(inner) if isinstance(inner, Mapping) else {}
        inside[last] = value
    return changed


def without(container: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy without a dotted key that it has."""
    section, _, last = key.rpartition(".")
    inside = dict(value_at(container, section) if section else container)
    del inside[last]
    return with_settings(container, {section: inside}) if section else inside


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a value with every text in it changed. Keys stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(inner, change) for inner in value]
    return value
