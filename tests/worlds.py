"""A `world` section with the declared defaults."""

from typing import Any

from pipelinerl.config.keys import declared
from pipelinerl.config.sections import WorldSection


def world_section(**changes: Any) -> WorldSection:
    """A test names the values that it depends on."""
    return WorldSection(**{key.name: key.default for key in declared(WorldSection)} | changes)
