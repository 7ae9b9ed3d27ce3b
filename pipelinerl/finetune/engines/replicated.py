"""Replication: every rank holds the whole policy, what it trains in float32, and gradients are summed once per step.

Half precision is computed by autocast over float32 parameters, so small updates are not lost.
"""

import warnings
from contextlib import AbstractContextManager
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.config.engine import TRAITS
from pipelinerl.config.sections import Config
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.engines.stepping import SteppingEngine
from pipelinerl.finetune.model import DTYPES, Policy, PolicyOutput, materialise, narrow_frozen
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rl.objective import LossSettings

BUCKET_BYTES = 64 * 2**20
"""Large enough to use a link fully, and little beside the model that is copied into it part by part."""
EXPERT_PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of all experts at once, which torch's autocast leaves in float32."""


class ReplicatedEngine(SteppingEngine):
    """`finetune.engine: ddp`."""

    traits = TRAITS["ddp"]

    def __init__(self, policy: Policy, cfg: Config, device: torch.device):
        finetune = cfg.finetune
        narrow_frozen(policy.lm, DTYPES[finetune.dtype])
        materialise(policy, device)
        self.policy = policy
        self.device = device
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.dtype = DTYPES[finetune.dtype]
        if self.dtype != torch.float32:
            _cast_experts(device.type, self.dtype)
        self.make_optimizer(finetune)

    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        with self.precision():
            return self.policy(batch, settings)

    def precision(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def backward(self, loss: Tensor, last: bool) -> None:
        (loss * self.policy.loss_scale).backward()
        if last and self.world_size > 1:
            self._sum_gradients()

    def local_piece(self, tensor: Tensor) -> Piece:
        return Piece(tensor.view(-1), 0, tensor.numel())

    def own_pieces(self) -> dict[str, Piece]:
        shares = {name: piece.cut(self.rank, self.world_size) for name, piece in self.pieces().items()}
        return {name: piece for name, piece in shares.items() if len(piece.tensor)}

    def _sum_gradients(self) -> None:
        """Sum the gradients over ranks, in flat buckets of about ``BUCKET_BYTES``."""
        bucket: list[Tensor] = []
        size = 0
        for parameter in self.trained.values():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            parameter.grad = gradient
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
            if size >= BUCKET_BYTES:
                _all_reduce(bucket)
                bucket, size = [], 0
        _all_reduce(bucket)


@lru_cache(maxsize=1)
def _cast_experts(device_type: str, dtype: torch.dtype) -> None:
    """Has autocast cover the products of experts in this process, as it does those of every other layer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an engine of another data type came before: the newest one's holds
        for product in EXPERT_PRODUCTS:
            torch.library.register_autocast(product, device_type, dtype)


def _all_reduce(gradients: list[Tensor]) -> None:
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
