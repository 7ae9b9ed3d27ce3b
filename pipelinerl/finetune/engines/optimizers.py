"""Optimizers by name: the built-in AdamW and Muon, or a class of torch, bitsandbytes, torchao or the user's.

Every state of another optimizer is saved and loaded as it is, so its class may keep states of any shape and data type.
All of them must exist before a checkpoint is read. `make_states` makes them by a step of size 0 on gradients of 0.
"""

import inspect
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.engine import ADAMW, MUON
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
    make = MuonAndAdamW.of(policy) if options.name == MUON else optimizer_class(options.name)
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


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al., 2024) for the matrices of the layers, AdamW for embeddings, head, experts and vectors.

    Both are torch's. Muon's steps are scaled to the size of AdamW's (arXiv:2502.16982, §2.2), so that one learning rate
    serves both.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        others: Collection[Tensor] = (),
        **muon: Any,
    ):
        """``others``: parameters that are no layer's matrices. ``muon``: further options of ``torch.optim.Muon``."""
        left = {id(parameter) for parameter in others}
        matrices: list[dict[str, Any]] = []
        rest: list[dict[str, Any]] = []
        for group in groups:
            is_matrix = [parameter.ndim == 2 and id(parameter) not in left for parameter in group["params"]]
            for part, wanted in ((matrices, True), (rest, False)):
                chosen = [p for p, found in zip(group["params"], is_matrix, strict=True) if found == wanted]
                part += [{**group, "params": chosen}] if chosen else []
        made = (
            (matrices, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw", **muon}),
            (rest, torch.optim.AdamW, {"betas": betas, "eps": eps}),
        )
        self._parts = [make(part, lr=lr, weight_decay=weight_decay, **more) for part, make, more in made if part]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @classmethod
    def of(cls, policy: Any) -> Callable[..., "MuonAndAdamW"]:
        lm = policy.lm
        ends = [lm.get_input_embeddings(), lm.get_output_embeddings(), policy.value_head]
        others = [parameter for end in ends if end is not None for parameter in end.parameters()]
        return partial(cls, others=others)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for part in self._parts:
            part.step()


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
