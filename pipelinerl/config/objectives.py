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
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelinerl.errors import ConfigError


@dataclass(frozen=True)
class BuiltInLoss:
    """A line of the registry."""

    function: str
    """Dotted name."""
    proximal: Literal["never", "optional", "always"]
    """Whether it clips a ratio to a proximal policy (`finetune.rl.proximal_every`)."""
    bounds: tuple[str, str]
    """Largest |∂ loss / ∂ log π| of a token with A = 1, and with A = −1: formulas of its keys, without corrections."""
    reads_weight: bool = False
    """Whether its factor is `weight_K`, which truncations and masks then bound. False: only a mask can act on it, and
    with a proximal policy a truncation of π_prox/μ."""


_CLIP_BOUNDS = ("1 + epsilon_high", "dual_clip")
POLICY_LOSSES: Mapping[str, BuiltInLoss] = {
    "reinforce": BuiltInLoss(
        "pipelinerl.finetune.rl.losses.reinforce",
        "never",
        ("ratio_clamp", "ratio_clamp"),
        reads_weight=True,
    ),
    "ppo": BuiltInLoss("pipelinerl.finetune.rl.losses.ppo", "optional", _CLIP_BOUNDS),
    "gspo": BuiltInLoss("pipelinerl.finetune.rl.losses.gspo", "optional", _CLIP_BOUNDS),
    "decoupled_ppo": BuiltInLoss("pipelinerl.finetune.rl.losses.ppo", "always", _CLIP_BOUNDS),
}
CORRECTIONS = ("token_tis", "sequence_tis", "token_mis", "token_mis_low", "sequence_mis", "veto")
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


@dataclass(frozen=True, kw_only=True)
class Signature:
    """Names of the arguments that a loss or an advantage gets from the run."""

    figures: frozenset[str] = frozenset()
    """``TOKEN_ARGUMENTS`` that a loss names."""
    required: tuple[str, ...] = ()
    """The other keyword-only parameters without a default, which the configuration gives."""
    optional: tuple[str, ...] = ()
    """Those with a default."""
    no_def_in: Path | None = None
    """The module of a loss in which its `def` was looked for and not found."""

    @property
    def given(self) -> tuple[str, ...]:
        """What the configuration gives."""
        return (*self.required, *self.optional)


@cache
def loss_signature(policy_loss: str) -> Signature:
    """The arguments of a loss, by its registered or dotted name.

    Its source is parsed, since the launcher may not run it: that would import torch. `from m import f` and `g = f` are
    followed. Empty where no module is found: the trial before the start says why.

    Raises:
        ConfigError: a module on the way is not valid Python.
    """
    dotted = POLICY_LOSSES[policy_loss].function if policy_loss in POLICY_LOSSES else policy_loss
    module, rest = _find_module(dotted)
    if module is None:
        return Signature()
    found = _find_def(module, rest, seen=set())
    if found is None:
        return Signature(no_def_in=module.path)
    named = {argument.arg for argument in [*found.args.args, *found.args.kwonlyargs]}
    defaults = dict(zip((a.arg for a in found.args.kwonlyargs), found.args.kw_defaults, strict=True))
    given = [name for name in defaults if name not in TOKEN_ARGUMENTS]
    return Signature(
        figures=frozenset(named.intersection(TOKEN_ARGUMENTS)),
        required=tuple(name for name in given if defaults[name] is None),
        optional=tuple(name for name in given if defaults[name] is not None),
    )


class _Module(NamedTuple):
    """A module in source form that was found but not imported."""

    name: str
    path: Path


def _find_module(dotted: str) -> tuple[_Module | None, str]:
    """The module of a dotted name, and the rest of the name. No package's `__init__` runs, as `find_spec` would do."""
    parts = dotted.split(".")
    try:
        spec = importlib.util.find_spec(parts[0]) if parts[0] else None
    except (ImportError, ValueError):
        return None, dotted
    used = 1
    while spec is not None and spec.submodule_search_locations is not None and used < len(parts) - 1:
        # by the last name alone: the whole one of a folder without `__init__.py` would need its parent imported
        inner = PathFinder.find_spec(parts[used], list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, used = inner, used + 1
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None, dotted
    return _Module(".".join(parts[:used]), Path(spec.origin)), ".".join(parts[used:])


def _find_def(module: _Module, name: str, seen: set[tuple[str, str]]) -> ast.FunctionDef | None:
    """The `def` to which a name leads at the top level of a module. ``seen`` ends circles of names."""
    if (module.name, name) in seen:
        return None
    seen.add((module.name, name))
    for node in reversed(_parsed(module.path).body):  # the last binding counts
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return _find_def(module, node.value.id, seen) if isinstance(node.value, ast.Name) else None
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    inner, rest = _find_module(f"{_imported_from(module, node)}.{alias.name}")
                    return None if inner is None else _find_def(inner, rest, seen)
    return None


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))  # bytes: Python reads their encoding
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        raise ConfigError(f"`finetune.rl.policy_loss`: {path} is not valid Python: {error}") from error


def _imported_from(module: _Module, node: ast.ImportFrom) -> str:
    """The absolute name of the module in `from … import …`."""
    if not node.level:
        return node.module or ""
    package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def function_signature(function: Callable[..., Any]) -> Signature:
    """The arguments of an advantage, which gets no figures."""
    parameters = inspect.signature(function).parameters.values()
    given = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return Signature(
        required=tuple(p.name for p in given if p.default is inspect.Parameter.empty),
        optional=tuple(p.name for p in given if p.default is not inspect.Parameter.empty),
    )


def names(registry: Mapping[str, Any]) -> str:
    """For descriptions of keys: `a`, `b` or a dotted name."""
    return ", ".join(f"`{name}`" for name in registry) + ", or the dotted name of a function of yours"


def keyword_arguments(
    key: str, name: str, signature: Signature, settings: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a loss or an advantage: ``own`` from the YAML first, then keys of `finetune.rl` of the same name.

    Args:
        key: `policy_loss` or `advantage`.
        name: of the function, for messages.
    Raises:
        ConfigError: ``own`` has what the function does not take, or a parameter without default has no value.
    """
    parameters = signature.given
    unknown = sorted(own.keys() - set(parameters))
    if unknown:
        raise ConfigError(
            f"`finetune.rl.{key}_kwargs.{unknown[0]}` is no keyword-only parameter of {name}, which takes "
            f"{', '.join(parameters) or 'none'}"
        )
    given = {n: own[n] if n in own else settings[n] for n in parameters if n in own or n in settings}
    missing = [n for n in signature.required if n not in given]
    if missing:
        raise ConfigError(f"`finetune.rl.{key}_kwargs.{missing[0]}` is missing: {name} needs it")
    return given
