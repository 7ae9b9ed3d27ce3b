"""FSDP2: torch's `fully_shard` shards parameters, gradients and optimizer states over the ranks.

Parameters are kept in float32. bfloat16 is a mixed-precision policy with float32 reduction. Each decoder layer is one
group, embedding and head are another. Gradients are reduce-scattered only in the last micro-batch of a step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pipelinerl.config.sections import FinetuneSection
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.engines.base import (
    OPTIMIZER_STATES,
    Engine,
    NonFiniteGradientError,
    adamw,
    create_moments,
    set_step,
)
from pipelinerl.finetune.model import DTYPES, Policy, PolicyOutput, Tokens, decoder_layers, is_empty
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rl.objective import LossSettings


class ShardedEngine(Engine):
    """`finetune.engine: fsdp2`."""

    def __init__(self, policy: Policy, finetune: FinetuneSection, device: torch.device):
        empty = is_empty(policy)
        self.policy = policy if empty else policy.to(device)
        self.device = device
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        self.clipping = finetune.gradient_clipping_threshold
        self._shard(MixedPrecisionPolicy(param_dtype=DTYPES[finetune.dtype], reduce_dtype=torch.float32))
        if empty:
            _make_shards(self.policy, device)
        self._parameters = dict(self.policy.named_parameters())
        self._trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self.optimizer = adamw(self.policy, finetune)
        create_moments(self.optimizer, self._trained.values())

    def _shard(self, precision: MixedPrecisionPolicy) -> None:
        """Shard the policy. Its inputs are not cast, because the constants of the loss are float32."""
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        for layer in decoder_layers(self.policy.lm):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        if self.policy.value_head is not None:
            fully_shard(self.policy.value_head, mesh=mesh)
        fully_shard(self.policy, mesh=mesh, mp_policy=replace(precision, cast_forward_inputs=False))

    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        return self.policy(batch, settings)

    def evaluate(self, tokens: Tokens | Batch) -> Tensor:
        """As in ``Engine``. Frees embedding and head, which would stay gathered and miss the next update."""
        try:
            return super().evaluate(tokens)
        finally:
            cast(FSDPModule, self.policy).reshard()

    def backward(self, loss: Tensor, last: bool) -> None:
        """As in ``Engine``. Scales the loss by the world size, because FSDP averages over ranks and we need a sum."""
        cast(FSDPModule, self.policy).set_requires_gradient_sync(last)
        (loss * self.world_size).backward()

    def step(self, learning_rate: float) -> float:
        parameters = list(self._trained.values())
        norm = _whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])).item()
        if not norm < float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradientError(f"the gradient norm is {norm}")
        if self.clipping is not None and norm > self.clipping:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.clipping, torch.tensor(norm, device=self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            yield name, _whole(parameter.detach())

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(parameter.shape)) for name, parameter in self._parameters.items()]

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self._trained.items():
            moments = self.optimizer.state[parameter]
            for key, tensor in {"param": parameter.detach(), **{k: moments[k] for k in OPTIMIZER_STATES}}.items():
                if tensor.to_local().numel():
                    found[f"{name}.{key}"] = _flat_piece(tensor)
        return found

    def loaded(self, num_steps: int) -> None:
        set_step(self.optimizer, num_steps)


def _make_shards(policy: Policy, device: torch.device) -> None:
    """Allocate this rank's shards without values. Buffers keep their values."""
    kept = {name: buffer.clone() for name, buffer in policy.named_buffers()}
    policy.to_empty(device=device)
    for name, values in kept.items():
        policy.get_buffer(name).copy_(values)


def _flat_piece(tensor: DTensor) -> Piece:
    """This rank's rows of ``tensor`` as a range of the flattened tensor."""
    [chunk] = tensor.__create_chunk_list__()
    return Piece(tensor.to_local().view(-1), chunk.offsets[0] * (tensor.numel() // len(tensor)), tensor.numel())


def _whole(tensor: Tensor) -> Tensor:
    """All-gather a sharded tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
