"""Tries an objective that the user wrote: `python -m pipelinerl.launcher.objective_check < configuration as JSON`.

Calls the policy loss and the advantage with a few made-up numbers, as trainer and preprocessor will. Prints one JSON
object {"refusal": text or null} as its last line. It is a separate process because it runs the user's code and loads
torch.
"""

import json
import os
import sys
from collections.abc import Callable

import numpy as np
import torch

from pipelinerl.config.load import parse_container
from pipelinerl.config.objectives import ADVANTAGES, POLICY_LOSSES
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.rl.objective import policy_term, settings_at
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.preprocess.advantages import group_advantages


def check_objective(cfg: Config) -> None:
    """Try the user's functions. Raises ``ConfigError`` that names the key and the function's mistake."""
    rl = cfg.finetune.rl
    if rl.policy_loss not in POLICY_LOSSES:
        _tried("policy_loss", rl.policy_loss, lambda: try_loss(cfg))
    if rl.advantage not in ADVANTAGES:
        _tried("advantage", rl.advantage, lambda: try_advantage(cfg))


def try_loss(cfg: Config) -> None:
    """Call the loss on two sequences with ratios from ½ to 2 and advantages of both signs.

    Then call it without tokens, because a rank may have none.
    """
    ratios = torch.tensor([0.5, 0.9, 1.0, 1.1, 2.0], requires_grad=True)
    for count in (5, 0):
        logprobs_K = (ratios.log() - 1.0)[:count]
        inputs = TokenInputs(
            sampler_logprobs_K=torch.full((count,), -1.0),
            advantages_K=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])[:count],
            weights_K=torch.ones(count),
            segments_K=torch.tensor([0, 0, 0, 1, 1])[:count],
            num_segments=2,
        )
        loss, _ = policy_term(logprobs_K, inputs, settings_at(cfg, 0))
        for name, values_K in (("losses_K", loss.losses_K), ("clipped_K", loss.clipped_K)):
            if values_K is not None and values_K.shape != (count,):
                raise ConfigError(f"{name} has shape {tuple(values_K.shape)} for {count} tokens: return one per token")
        if not torch.isfinite(loss.losses_K).all():
            raise ConfigError(f"the losses of ratios {ratios.tolist()} are {loss.losses_K.tolist()}")
        if count and not loss.losses_K.requires_grad:
            raise ConfigError("the losses have no gradient: compute them from logprobs_K, which is not a constant")


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
    except Exception as error:  # the user's function
        raise ConfigError(f"`finetune.rl.{key}` is {name}: {type(error).__name__}: {error}") from error


def main() -> None:
    container = json.load(sys.stdin)
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the function prints is not the answer
    refusal = None
    try:
        check_objective(parse_container(container))
    except ConfigError as error:
        refusal = str(error)
    answer.write(json.dumps({"refusal": refusal}) + "\n")
    answer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
