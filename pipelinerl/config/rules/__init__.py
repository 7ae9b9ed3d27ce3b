"""Constraints that cross sections, each a named function, and hints about settings that do nothing.

One file beside each file of `config/sections/`, and `objective` for `finetune.rl`. A rule returns the text of its
refusal or None, a hint that of its warning or None. Texts name the keys, the values, the constraint and the fix.
"""

from pipelinerl.config.rules import experiment, machines, objective, rollouts, serving, training
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError

RULES = (
    *experiment.RULES,
    *machines.RULES,
    *serving.RULES,
    *rollouts.RULES,
    *objective.RULES,
    *training.RULES,
)
HINTS = (
    *experiment.HINTS,
    *machines.HINTS,
    *serving.HINTS,
    *objective.HINTS,
    *training.HINTS,
)


def check_rules(config: Config) -> None:
    """Raise one `ConfigError` that names every broken rule."""
    refusals = [text for rule in RULES if (text := rule(config))]
    if refusals:
        raise ConfigError("; ".join(refusals))


def hints(config: Config) -> list[str]:
    """Warnings about settings without effect or with a cost."""
    return [text for hint in HINTS if (text := hint(config))]
