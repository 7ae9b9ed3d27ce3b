"""Constraints that cross sections, each a named function, and warnings about settings that do nothing.

A rule returns the text of its refusal or None; a hint returns the text of a warning or None.
"""

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError

RULES = ()


def check(config: Config) -> None:
    """Raise one `ConfigError` with every broken rule."""
    refusals = [text for rule in RULES if (text := rule(config))]
    if refusals:
        raise ConfigError("; ".join(refusals))
