"""Tries the objective: `python -m pipelinerl.launcher.objective_check < configuration as JSON`.

Calls the policy loss, and an advantage that the user wrote, with made-up numbers, as trainer and preprocessor will.
Answers {"refusal": text or null}.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from pipelinerl.config.load import parse_container
from pipelinerl.config.objectives import ADVANTAGES
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.launcher.trial import answer
from pipelinerl.preprocess.advantages import group_advantages
from pipelinerl.testing.losses import try_loss


def check_objective(cfg: Config) -> None:
    """Try the functions. Raises ``ConfigError`` that names the key and the function's mistake."""
    rl = cfg.finetune.rl
    _tried("policy_loss", rl.policy_loss, lambda: try_loss(settings_at(cfg, 0), has_gaps=cfg.sft.per_step > 0))
    if rl.advantage not in ADVANTAGES:
        _tried("advantage", rl.advantage, lambda: try_advantage(cfg))


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
