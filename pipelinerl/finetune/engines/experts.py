"""Expert parallelism: the ranks of a group divide each layer's experts among them, and tokens travel to their experts.

Both ways are one all-to-all of as many rows as there are choices. No token is dropped. An owner's part is a range of
the flattened parameter, which FSDP shards further over the ranks that own the same experts (docs/cluster.md).

Shapes: T tokens of this rank, k chosen experts of each, H hidden size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.router_replay import EXPERTS

CHOICE = ("top_k_index", "top_k_weights")
"""Names under which transformers' experts take the routers' choice."""


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that divide the experts, of which this is one, and those that own the same experts as this one."""

    group: Any
    """Process group of the first."""
    index: int
    """This rank's number in it. Rank i owns the i-th part of each layer's experts."""
    size: int
    sharing: DeviceMesh
    """Mesh of the second, over which FSDP shards this rank's part: [copies ×] shards."""

    def piece_of_whole(self, piece: Piece) -> Piece:
        """A piece of this rank's part, as a piece of the whole parameter."""
        return Piece(piece.tensor, piece.start + self.index * piece.whole, piece.whole * self.size)

    def whole_shape(self, part: torch.Size) -> tuple[int, ...]:
        """Shape of the whole parameter if every rank owns a part of this shape."""
        return (part[0] * self.size, *part[1:])

    def own(self, full: Tensor) -> Tensor:
        """View of this rank's part of a whole parameter."""
        return full.chunk(self.size)[self.index]

    def gather(self, part: Tensor, full: Tensor) -> Tensor:
        """Fill ``full`` with every rank's ``part``, which may be ``own(full)``, and return it. Collective."""
        self.own(full).copy_(part)
        for rank, place in enumerate(full.chunk(self.size)):
            dist.broadcast(place, group=self.group, group_src=rank)
        return full


def make_expert_group(mesh: DeviceMesh, size: int | None) -> ExpertGroup | None:
    """Divide the experts among each ``size`` consecutive ranks. None or 1: nothing is divided. Collective.

    Args:
        mesh: of all ranks, [copies ×] shards.
    Raises:
        ConfigError: ``size`` does not divide the ranks that share a copy.
    """
    if size is None or size == 1:
        return None
    *copies, shards = mesh.shape
    names = mesh.mesh_dim_names
    if shards % size:
        raise ConfigError(
            f"`finetune.expert_ranks` is {size}, but {shards} ranks share the weights, which is no multiple: set it to "
            "a divisor, such as the GPUs of a node, or to null"
        )
    divided = init_device_mesh(mesh.device_type, (*copies, shards // size, size), mesh_dim_names=(*names, EXPERTS))
    return ExpertGroup(divided.get_group(EXPERTS), divided.get_local_rank(EXPERTS), size, divided[names])


def expert_modules(lm: nn.Module) -> list[nn.Module]:
    """The experts of each layer that has some.

    Raises:
        ConfigError: there are none, they are not called with the router's choice, or not every parameter is divided by
            experts alone (experts in a module of their own, experts without parameters).
    """
    found = [module for name, module in lm.named_modules() if name.rpartition(".")[2] == EXPERTS]
    if not found:
        raise ConfigError("`finetune.expert_ranks` is set, but the model has no experts: set it to null")
    for module in found:
        if not set(CHOICE) <= inspect.signature(module.forward).parameters.keys():
            raise ConfigError(
                f"`finetune.expert_ranks` is set, but {type(module).__name__} does not take the router's choice by the "
                f"names {', '.join(CHOICE)}: set it to null"
            )
        sizes = {name: parameter.shape[0] for name, parameter in module.named_parameters()}
        count = getattr(module, "num_experts", None)
        if odd := next((name for name, size in sizes.items() if size != count or "." in name), None):
            raise ConfigError(
                f"`finetune.expert_ranks` is set, but {type(module).__name__} (num_experts={count}) keeps {odd} with "
                f"{sizes[odd]} rows, which ranks cannot divide by experts: set it to null"
            )
    return found


def divide_experts(lm: nn.Module, group: ExpertGroup) -> list[nn.Module]:
    """Keep this rank's part of the experts, and let tokens travel. Returns the modules that hold the parts.

    Raises:
        ConfigError: the experts cannot be divided evenly, or ``expert_modules`` raises it.
    """
    modules = expert_modules(lm)
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            if len(parameter) % group.size:
                raise ConfigError(
                    f"`finetune.expert_ranks` is {group.size}, which does not divide the model's {len(parameter)} "
                    "experts: set it to a divisor of them"
                )
            part = parameter.detach().chunk(group.size)[group.index].clone()
            module.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
        own = len(next(module.parameters()))
        module.num_experts = own  # type: ignore[assignment]  # which the forward pass reads
        module.forward = partial(exchanged, module.forward, group, own)
    return modules


def exchanged(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: ExpertGroup,
    own: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """[T, H] Σ_k weight · expert(state), computed by the experts' owners. Collective, also its backward pass.

    Args:
        compute: the forward pass of this rank's experts.
        own: number of experts of each rank.
        hidden_states: [T, H]
        top_k_index: int64 [T, k]
        top_k_weights: [T, k]
    """
    owners, experts = top_k_index.flatten() // own, top_k_index.flatten() % own
    order = owners.argsort(stable=True)
    sent = torch.bincount(owners, minlength=group.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    splits = sent.tolist(), received.tolist()
    # One row of zeros more, so that a rank to which no token comes has gradients to reduce and to send back, too.
    rows = hidden_states[order // top_k_index.shape[1]]
    rows = F.pad(_Exchange.apply(rows, *splits, group.group), (0, 0, 0, 1))
    experts = F.pad(_Exchange.apply(experts[order], *splits, group.group), (0, 1))[:, None]
    made = compute(rows, experts, torch.ones_like(experts, dtype=top_k_weights.dtype))[:-1]
    returned = _Exchange.apply(made, *reversed(splits), group.group)[order.argsort()]  # not index_add: its order varies
    weighted = (returned * top_k_weights.flatten()[:, None]).unflatten(0, top_k_index.shape)
    return weighted.sum(1).to(hidden_states.dtype)


class _Exchange(torch.autograd.Function):
    """All-to-all of rows. Its backward pass sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.returned = received, sent, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, *ctx.returned), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out
