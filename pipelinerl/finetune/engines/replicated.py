"""Replication: every rank holds the whole policy in float32, and gradients are summed over ranks once per step.

bfloat16 is computed by autocast over float32 parameters, so small updates are not lost.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

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
from pipelinerl.finetune.model import DTYPES, Policy, PolicyOutput, materialise
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rl.objective import LossSettings

BUCKET_BYTES = 64 * 2**20


class ReplicatedEngine(Engine):
    """`finetune.engine: ddp`."""

    def __init__(self, policy: Policy, finetune: FinetuneSection, device: torch.device):
        materialise(policy, device)
        self.policy = policy
        self.device = device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.dtype = DTYPES[finetune.dtype]
        self.clipping = finetune.gradient_clipping_threshold
        self.optimizer = adamw(self.policy, finetune)
        self._trained = {name: p for name, p in self.policy.named_parameters() if p.requires_grad}
        create_moments(self.optimizer, self._trained.values())

    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        with self.precision():
            return self.policy(batch, settings)

    def precision(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()
        if last and self.world_size > 1:
            self._sum_gradients()

    def step(self, learning_rate: float) -> float:
        parameters = list(self._trained.values())
        limit = self.clipping if self.clipping is not None else float("inf")
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()
        if not norm < float("inf"):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteGradientError(f"the gradient norm is {norm}")
        if norm > limit:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.tensor(norm, device=self.device))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def named_full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.policy.named_parameters():
            yield name, parameter.detach()

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(parameter.shape)) for name, parameter in self.policy.named_parameters()]

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self._trained.items():
            moments = self.optimizer.state[parameter]
            for key, tensor in {"param": parameter.detach(), **{k: moments[k] for k in OPTIMIZER_STATES}}.items():
                found[f"{name}.{key}"] = Piece(tensor.view(-1), 0, tensor.numel())
        return found

    def own_pieces(self) -> dict[str, Piece]:
        shares = {name: piece.cut(self.rank, self.world_size) for name, piece in self.pieces().items()}
        return {name: piece for name, piece in shares.items() if len(piece.tensor)}

    def loaded(self, num_steps: int) -> None:
        set_step(self.optimizer, num_steps)

    def _sum_gradients(self) -> None:
        """Sum the gradients over ranks, in flat buckets of about ``BUCKET_BYTES``."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._trained.values():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = gradient
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= BUCKET_BYTES:
                _all_reduce(bucket)
                bucket, size = [], 0
        _all_reduce(bucket)


def _all_reduce(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
