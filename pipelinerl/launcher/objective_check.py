"""Tries the objective: `python -m pipelinerl.launcher.objective_check < configuration as JSON`.

Calls the policy loss, and an advantage that the user wrote, with a few made-up numbers, as trainer and preprocessor
will. Prints one JSON object {"refusal": text or null} as its last line. It is a separate process because it runs the
user's code and loads torch.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from pipelinerl.config.load import parse_container
from pipelinerl.config.objectives import ADVANTAGES, TOKEN_ARGUMENTS, token_arguments
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import find_loss, settings_at
from pipelinerl.launcher.trial import answer
from pipelinerl.preprocess.advantages import group_advantages
from pipelinerl.testing.losses import try_loss


def check_objective(cfg: Config) -> None:
    """Try the functions. Raises ``ConfigError`` that names the key and the function's mistake."""
    rl = cfg.finetune.rl
    _tried("policy_loss", rl.policy_loss, lambda: _try_policy_loss(cfg))
    if rl.advantage not in ADVANTAGES:
        _tried("advantage", rl.advantage, lambda: try_advantage(cfg))


def _try_policy_loss(cfg: Config) -> None:
    _refuse_hidden_figures(cfg.finetune.rl.policy_loss)
    try_loss(settings_at(cfg, 0), has_gaps=cfg.sft.per_step > 0)


def _refuse_hidden_figures(policy_loss: str) -> None:
    """Refuse a loss whose signature has figures that its source does not show where the key says."""
    hidden = set(inspect.signature(find_loss(policy_loss)).parameters) & set(TOKEN_ARGUMENTS)
    if hidden := hidden - token_arguments(policy_loss):
        raise ConfigError(
            f"it takes {', '.join(sorted(hidden))}, but its module has no `def` of this name with them: define the "
            "function, with these parameters, at the top level of the module that the key names"
        )


def try_advantage(cfg: Config) -> None:
    """Call the advantage with returns of a group of 4 and a group of 1, and with 3 returns per rollout of 4."""
    rng = np.random.default_rng(0)
    for shape in ((4,), (1,), (4, 3)):
        found = group_advantages(rng.normal(size=shape), cfg.finetune.rl.advantage, cfg.finetune.rl.advantage_kwargs)
        if not np.isfinite(found).all():
            raise ConfigError(f"returned {found.tolist()} for returns of shape {shape}")


def _tried(key: str, name: str, attempt: Callable[[], None]) -> None:
    try:
        attempt()
    except ConfigError as error:
        raise ConfigError(f"`finetune.rl.{key}` is {name}: {error}") from error
    except Exception as error:  # the user's function
        raise ConfigError(f"`finetune.rl.{key}` is {name}: {type(error).__name__}: {error}") from error


def verdict_on(container: dict[str, Any]) -> dict[str, str | None]:
    try:
        check_objective(parse_container(container))
    except ConfigError as error:
        return {"refusal": str(error)}
    return {"refusal": None}


if __name__ == "__main__":
    answer(verdict_on)
