"""Optimizers by name: the built-in AdamW, or a class of torch, bitsandbytes, torchao or the user's.

Every state of another optimizer is saved and loaded as it is, so its class may keep states of any shape and data type.
All of them must exist before a checkpoint is read. `make_states` makes them by a step of size 0 on gradients of 0.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.engine import ADAMW
from pipelinerl.config.sections import FinetuneSection
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.engines.base import adamw, create_moments, parameter_groups

STEP = "step"
"""Name of the state that counts steps. It is set, not saved."""
OPTIONAL = ("bitsandbytes", "torchao")
"""Packages that a user installs for their optimizers."""


def make_optimizer(policy: nn.Module, finetune: FinetuneSection) -> torch.optim.Optimizer:
    """Make `finetune.optimizer.name` over the trained parameters, with all of its states.

    Raises:
        ConfigError: there is no such class, or it does not take these options or parameters.
    """
    options, trained = finetune.optimizer, [p for p in policy.parameters() if p.requires_grad]
    if options.name == ADAMW:
        optimizer: torch.optim.Optimizer = adamw(policy, finetune)
        create_moments(optimizer, trained)
        return optimizer
    make = optimizer_class(options.name)
    known = inspect.signature(make).parameters
    if options.weight_decay and "weight_decay" not in known:
        raise ConfigError(f"`finetune.optimizer.name` is {options.name}: it has no weight decay; set that to 0")
    given = {
        name: value
        for name, value in (("betas", options.betas), ("eps", options.eps))
        if name in known and isinstance(known[name].default, type(value))  # Adafactor's eps is a pair, for example
    }
    groups = parameter_groups(policy, options.weight_decay)
    try:
        optimizer = make(groups, **{"lr": finetune.learning_rate, **given, **options.kwargs})
        make_states(optimizer, trained)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"`finetune.optimizer.name` is {options.name}, which does not take these parameters or "
            f"`finetune.optimizer.kwargs`: {' '.join(str(error).split())}"
        ) from error
    return optimizer


def optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Import an optimizer's class. Raises ``ConfigError`` if there is none, with the package to install."""
    package = name.partition(".")[0]
    try:
        found = resolve_function(name)
    except ConfigError as error:
        install = f"; `pip install {package}` brings it" if package in OPTIONAL else ""
        raise ConfigError(f"`finetune.optimizer.name`: {error}{install}") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"`finetune.optimizer.name` is {name}: it is no torch.optim.Optimizer")
    return found


@torch.no_grad()
def make_states(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Make every state, as of before the first step. The parameters do not change."""
    rate = float(optimizer.param_groups[0]["lr"])
    before = [(parameter, parameter.detach().clone()) for parameter in parameters]
    set_rate(optimizer, 0.0)
    for parameter, _ in before:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for parameter, values in before:
        parameter.copy_(values)
    set_rate(optimizer, rate)
    set_num_steps(optimizer, 0)


def state_tensors(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The states of a parameter that a checkpoint holds, by name."""
    states = optimizer.state[parameter].items()
    return {name: value for name, value in states if isinstance(value, Tensor) and name != STEP}


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate. torchao keeps it in a tensor, which compiled steps read."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def set_num_steps(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Set the number of finished steps, by which moments are corrected."""
    for state in optimizer.state.values():
        counted: Any = state.get(STEP)
        if isinstance(counted, Tensor):
            counted.fill_(float(num_steps))
        elif counted is not None:
            state[STEP] = num_steps
