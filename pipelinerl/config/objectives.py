"""Registry of the built-in policy losses and advantages, and how a function of either kind gets its arguments.

A built-in one is a dotted name like anybody's own (`finetune.rl.policy_loss=my_module.my_loss`) with a short name in
front. Light: nothing here imports torch, so that the rules can ask what a loss uses.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipelinerl.errors import ConfigError


@dataclass(frozen=True)
class BuiltInLoss:
    """A line of the registry."""

    function: str
    """Dotted name."""
    keys: tuple[str, ...]
    """Keys of `finetune.rl` that it takes: its keyword-only parameters."""
    proximal: Literal["never", "optional", "always"]
    """Whether it clips a ratio to a proximal policy (`finetune.rl.proximal_every`)."""
    bounds: tuple[str, str]
    """Largest |∂ loss / ∂ log π| of a token with A = 1, and with A = −1: formulas of its keys, without corrections."""
    reads_weight: bool = False
    """Whether its factor is `weight_K`, which truncations and masks then bound. False: only a mask can act on it, and
    with a proximal policy a truncation of π_prox/μ."""


_CLIP = ("epsilon_low", "epsilon_high", "dual_clip")
_CLIP_BOUNDS = ("1 + epsilon_high", "dual_clip")
POLICY_LOSSES: Mapping[str, BuiltInLoss] = {
    "reinforce": BuiltInLoss(
        "pipelinerl.finetune.rl.losses.reinforce",
        ("ratio_clamp",),
        "never",
        ("ratio_clamp", "ratio_clamp"),
        reads_weight=True,
    ),
    "ppo": BuiltInLoss("pipelinerl.finetune.rl.losses.ppo", _CLIP, "optional", _CLIP_BOUNDS),
    "gspo": BuiltInLoss("pipelinerl.finetune.rl.losses.gspo", _CLIP, "optional", _CLIP_BOUNDS),
    "decoupled_ppo": BuiltInLoss("pipelinerl.finetune.rl.losses.ppo", _CLIP, "always", _CLIP_BOUNDS),
}
CORRECTIONS = ("token_tis", "sequence_tis", "token_mis", "sequence_mis", "veto")
"""Keys of `finetune.rl` that correct a ratio. Null = off."""
ADVANTAGES: Mapping[str, str] = {
    "loo": "pipelinerl.preprocess.advantages.leave_one_out",
    "group_mean": "pipelinerl.preprocess.advantages.group_mean",
    "group_std": "pipelinerl.preprocess.advantages.group_std",
    "batch_std": "pipelinerl.preprocess.advantages.leave_one_out",
    "gdpo": "pipelinerl.preprocess.advantages.group_std",
    "value": "pipelinerl.preprocess.advantages.returns",
}
SCALED_BY_BATCH = ("batch_std", "gdpo")
"""Advantages that are then divided by the standard deviation of the optimizer batch."""


TOKEN_ARGUMENTS = ("ref_logprobs", "teacher_logprobs", "entropy", "values", "segments", "rewards", "lag")
"""Names of a policy loss's parameters that are figures of the trained tokens. Only those that it names are computed."""


@cache
def token_arguments(policy_loss: str) -> frozenset[str]:
    """The ``TOKEN_ARGUMENTS`` that a loss of the user's names. Its source is parsed, since running it imports torch.

    Empty for a built-in loss, and where no `def` of that name is found: the trial before the start says why.
    """
    parts = policy_loss.split(".")
    if policy_loss in POLICY_LOSSES or len(parts) < 2:
        return frozenset()
    module, name = ".".join(parts[:-1]), parts[-1]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return frozenset()
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return frozenset()
    defined = [
        node
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    found = {
        argument.arg for node in defined if node.name == name for argument in [*node.args.args, *node.args.kwonlyargs]
    }
    return frozenset(found.intersection(TOKEN_ARGUMENTS))


def names(registry: Mapping[str, Any]) -> str:
    """For descriptions of keys: `a`, `b` or a dotted name."""
    return ", ".join(f"`{name}`" for name in registry) + ", or the dotted name of a function of yours"


def keyword_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Those that the configuration gives."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return [parameter for parameter in keywords if parameter.name not in TOKEN_ARGUMENTS]


def keyword_arguments(
    key: str, function: Callable[..., Any], settings: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a loss or an advantage: ``own`` from the YAML first, then keys of `finetune.rl` of the same name.

    Raises:
        ConfigError: ``own`` has what the function does not take, or a parameter without default has no value.
    """
    parameters = {parameter.name: parameter for parameter in keyword_parameters(function)}
    name = getattr(function, "__qualname__", type(function).__name__)
    unknown = sorted(own.keys() - parameters.keys())
    if unknown:
        raise ConfigError(
            f"`finetune.rl.{key}_kwargs.{unknown[0]}` is no keyword-only parameter of {name}, which takes "
            f"{', '.join(parameters) or 'none'}"
        )
    given = {n: own[n] if n in own else settings[n] for n in parameters if n in own or n in settings}
    missing = [n for n, p in parameters.items() if n not in given and p.default is inspect.Parameter.empty]
    if missing:
        raise ConfigError(f"`finetune.rl.{key}_kwargs.{missing[0]}` is missing: {name} needs it")
    return given
