"""FSDP2: torch's `fully_shard` shards parameters, gradients and optimizer states over the ranks (docs/cluster.md).

Parameters and reductions are float32. Each decoder layer is one group, embedding and head are another. The ranks are a
mesh of copies × shards, in which neighbours share a copy. Divided experts have a mesh of their own,
[copies ×] shards × experts: neighbours own different experts, and shard them over the others.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipelinerl.config.engine import TRAITS
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.engines.experts import ExpertGroup, divide_experts, make_expert_group
from pipelinerl.finetune.engines.optimizers import state_tensors
from pipelinerl.finetune.engines.stepping import SteppingEngine
from pipelinerl.finetune.model import DTYPES, Policy, PolicyOutput, Tokens, decoder_layers, is_empty, narrow_frozen
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rl.objective import LossSettings

CPU = torch.device("cpu")
COPIES, SHARDS = "copies", "shards"
"""Dimensions of the mesh."""


class ShardedEngine(SteppingEngine):
    """`finetune.engine: fsdp2`."""

    traits = TRAITS["fsdp2"]

    def __init__(self, policy: Policy, cfg: Config, device: torch.device):
        finetune = cfg.finetune
        empty, offloads = is_empty(policy), finetune.cpu_offload is True
        narrow_frozen(policy.lm, DTYPES[finetune.dtype])
        self.policy = policy if empty or offloads else policy.to(device)  # FSDP moves it group by group
        self.device = device
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.shards_gradients = finetune.shard_gradients is True
        self.mesh = make_mesh(device, self.world_size, finetune.shard_ranks)
        self.experts = make_expert_group(self.mesh, finetune.expert_ranks)
        precision = MixedPrecisionPolicy(param_dtype=DTYPES[finetune.dtype], reduce_dtype=torch.float32)
        self._shard(precision, CPUOffloadPolicy(pin_memory=device.type == "cuda") if offloads else OffloadPolicy())
        if empty:
            _make_shards(self.policy, CPU if offloads else device, device)
        self.make_optimizer(finetune)
        check_states(self.optimizer, finetune.optimizer.name)

    def _shard(self, precision: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
        """Shard the policy. Its inputs are not cast, because the constants of the loss are float32."""
        as_given = replace(precision, cast_forward_inputs=False)  # some routers weigh experts in float32
        if self.experts is not None:
            for experts in divide_experts(self.policy.lm, self.experts):
                fully_shard(experts, mesh=self.experts.sharing, mp_policy=as_given, offload_policy=offload)
        for layer in decoder_layers(self.policy.lm):
            fully_shard(layer, mesh=self.mesh, mp_policy=precision, offload_policy=offload)
        if self.policy.value_head is not None:
            fully_shard(self.policy.value_head, mesh=self.mesh, offload_policy=offload)
        fully_shard(self.policy, mesh=self.mesh, mp_policy=as_given, offload_policy=offload)
        for module in self.policy.modules():
            if isinstance(module, FSDPModule):
                # Gradients are summed over ranks, where FSDP would average them.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        return self.policy(batch, settings)

    def evaluate(self, tokens: Tokens | Batch) -> Tensor:
        """As in ``Engine``. Frees embedding and head, which would stay gathered and miss the next update."""
        try:
            return super().evaluate(tokens)
        finally:
            cast(FSDPModule, self.policy).reshard()

    def backward(self, loss: Tensor, last: bool) -> None:
        cast(FSDPModule, self.policy).set_requires_gradient_sync(last or self.shards_gradients)
        (loss * self.policy.loss_scale).backward()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """As in ``SteppingEngine``. The ranks that share a copy hold different shards of everything, experts too."""
        shards = [cast(DTensor, gradient).to_local() for gradient in gradients]
        square = torch.nn.utils.get_total_norm(shards).square().to(self.device)
        dist.all_reduce(square, group=self.mesh.get_group(SHARDS))
        return square.sqrt().item()

    def named_full_parameters(
        self, dtype: torch.dtype | None = None, *, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """As in ``Engine``. On the CPU all parameters use the same memory, one after another."""
        parameters = self.trained if trained_only else self.parameters
        shapes = dict(self.full_shapes())
        if self.device.type != "cpu":
            for name, gathered in super().named_full_parameters(dtype, trained_only=trained_only):
                owners = self._owners(parameters[name])
                yield name, gathered if owners is None else owners.gather(gathered, gathered.new_empty(shapes[name]))
            return
        kinds = {name: dtype or parameter.dtype for name, parameter in parameters.items()}
        sizes = {name: math.prod(shapes[name]) * kinds[name].itemsize for name in parameters}
        # Gloo's all-gather allocates each tensor again in its own threads, whose allocators keep what was freed.
        memory = torch.empty(max(sizes.values()), dtype=torch.uint8)
        for name, parameter in parameters.items():
            full = memory[: sizes[name]].view(kinds[name]).view(shapes[name])
            owners = self._owners(parameter)
            if owners is None:
                yield name, _gather(parameter.detach(), full, self.mesh)
            else:
                yield name, owners.gather(_gather(parameter.detach(), owners.own(full), owners.sharing), full)

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        named = ((name, parameter, self._owners(parameter)) for name, parameter in self.parameters.items())
        return [
            (name, tuple(parameter.shape) if owners is None else owners.whole_shape(parameter.shape))
            for name, parameter, owners in named
        ]

    def own_pieces(self) -> dict[str, Piece]:
        """As in ``Engine``. Ranks of several copies divide each shard that they have in common."""
        if self.mesh.ndim == 1:
            return self.pieces()
        copy, copies = self.mesh.get_local_rank(COPIES), self.mesh.size(0)
        shares = {name: piece.cut(copy, copies) for name, piece in self.pieces().items()}
        return {name: piece for name, piece in shares.items() if len(piece.tensor)}

    def local_piece(self, tensor: DTensor) -> Piece | None:
        """This rank's rows of ``tensor``."""
        if not tensor.to_local().numel():
            return None
        [chunk] = tensor.__create_chunk_list__()
        rows = Piece(tensor.to_local().view(-1), chunk.offsets[0] * (tensor.numel() // len(tensor)), tensor.numel())
        owners = self._owners(tensor)
        return rows if owners is None else owners.piece_of_whole(rows)

    def _owners(self, tensor: Tensor) -> ExpertGroup | None:
        """The group that divides what ``tensor`` is a part of: experts, their gradients or states. Else None."""
        is_part = self.experts is not None and cast(DTensor, tensor).device_mesh == self.experts.sharing
        return self.experts if is_part else None


def check_states(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Refuse an optimizer with states that are not sharded as their parameters are. A checkpoint could not hold them.

    Raises:
        ConfigError: there is such a state.
    """
    for parameter in optimizer.state:
        for key, state in state_tensors(optimizer, parameter).items():
            if not isinstance(state, DTensor) or state.shape != parameter.shape:
                raise ConfigError(
                    f"`finetune.optimizer.name` is {name}: its state {key!r} is not sharded as its parameter is, which "
                    "finetune.engine=fsdp2 needs; use finetune.engine=ddp, or another optimizer"
                )


def make_mesh(device: torch.device, world_size: int, shard_ranks: int | None) -> DeviceMesh:
    """The mesh of the ranks: one dimension, or copies × the ranks that share one.

    Raises:
        ConfigError: `finetune.shard_ranks` does not divide the ranks.
    """
    sharing = shard_ranks or world_size
    if world_size % sharing:
        raise ConfigError(
            f"`finetune.shard_ranks` is {sharing}, but the trainer has {world_size} ranks, which is no multiple: set "
            "it to a divisor, such as the GPUs of a node, or to null"
        )
    if sharing == world_size:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=(SHARDS,))
    return init_device_mesh(device.type, (world_size // sharing, sharing), mesh_dim_names=(COPIES, SHARDS))


def _gather(parameter: DTensor, full: Tensor, mesh: DeviceMesh) -> Tensor:
    """Fill ``full`` with all shards' rows of ``parameter``, cast to its dtype, and return it. Collective."""
    rows, group = full.view(len(parameter), -1), mesh.get_group(SHARDS)
    shares = rows.split(-(-len(rows) // dist.get_world_size(group)))
    for rank, share in enumerate(shares):  # the last ranks have none if there are few rows
        if rank == dist.get_rank(group):
            share.copy_(parameter.to_local().view(share.shape))
        dist.broadcast(share, group=group, group_src=rank)
    return full


def _make_shards(policy: Policy, home: torch.device, device: torch.device) -> None:
    """Allocate this rank's shards in ``home``, without values. What has values keeps them: buffers and adapters."""
    named = [*policy.named_buffers(), *policy.named_parameters()]
    kept = {name: values.detach().clone() for name, values in named if not values.is_meta}
    policy.to_empty(device=home)
    for name, values in [*policy.named_buffers(), *policy.named_parameters()]:
        if name in kept:
            values.detach().copy_(kept[name])
    for buffer in policy.buffers():
        buffer.data = buffer.to(device)
