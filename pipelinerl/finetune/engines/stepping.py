"""The part that DDP and FSDP2 share: an optimizer over the policy's parameters, sharded or not.

In float16 the loss is scaled (arXiv:1710.03740, §3.2), with the constants of ``torch.amp.GradScaler``. The scale
follows the norm, which all ranks know and which also covers offloaded gradients and divided experts.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipelinerl.config.sections import FinetuneSection
from pipelinerl.finetune.engines.base import Engine, NonFiniteGradientError
from pipelinerl.finetune.engines.optimizers import make_optimizer, set_num_steps, set_rate, state_tensors
from pipelinerl.finetune.pieces import Piece

FIRST_SCALE = 2.0**16
STEPS_TO_DOUBLE = 2000
"""Steps without overflow after which the loss scale doubles."""


def next_scaling(scaling: Tensor, *, overflows: bool) -> Tensor:
    """`Engine.scaling` after a step: half the scale if the gradient overflowed."""
    scale, steps, skipped = scaling.tolist()
    if overflows:
        return torch.tensor([scale / 2, 0, skipped + 1])
    return torch.tensor([scale, steps + 1, skipped] if steps + 1 < STEPS_TO_DOUBLE else [2 * scale, 0, skipped])


class SteppingEngine(Engine):
    """An engine that clips and steps by itself. A subclass places the parameters, then calls ``make_optimizer``."""

    def make_optimizer(self, finetune: FinetuneSection) -> None:
        """Make the optimizer with its states. The parameters must have their final place."""
        self.clipping = finetune.gradient_clipping_threshold
        self.parameters = dict(self.policy.named_parameters())
        self.trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = make_optimizer(self.policy, finetune)
        if finetune.dtype == "float16":
            self.scaling = torch.tensor([FIRST_SCALE, 0, 0])
            self.policy.loss_scale = FIRST_SCALE

    def step(self, learning_rate: float) -> float:
        scale = self.policy.loss_scale
        norm = self.gradient_norm([p.grad for p in self.trained.values() if p.grad is not None]) / scale
        overflows = not norm < float("inf")
        if self.scaling is not None:
            self.scaling.copy_(next_scaling(self.scaling, overflows=overflows))
            self.policy.loss_scale = float(self.scaling[0])
        if overflows:
            self.optimizer.zero_grad(set_to_none=True)
            if scale > 1:
                return norm
            raise NonFiniteGradientError(f"the gradient norm is {norm}")
        if scale != 1:
            for parameter in self.trained.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / scale)
        if self.clipping is not None and norm > self.clipping:
            for group in self.optimizer.param_groups:
                whole_norm = torch.tensor(norm, device=self.device)
                torch.nn.utils.clip_grads_with_norm_(group["params"], self.clipping, whole_norm)
        set_rate(self.optimizer, learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gradient_norm(self, gradients: Sequence[Tensor]) -> float:
        """Norm of the whole gradient, over all ranks. Collective."""
        return whole(torch.nn.utils.get_total_norm(gradients)).item()

    def named_full_parameters(
        self, dtype: torch.dtype | None = None, *, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in (self.trained if trained_only else self.parameters).items():
            yield name, whole(parameter.detach().to(self.device, dtype or parameter.dtype))

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(parameter.shape)) for name, parameter in self.parameters.items()]

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self.trained.items():
            states = state_tensors(self.optimizer, parameter)
            for key, tensor in {"param": parameter.detach(), **states}.items():
                piece = self.local_piece(tensor)
                if piece is not None:
                    found[f"{name}.{key}"] = piece
        return found

    def weights(self) -> dict[str, Piece]:
        pieces = ((name, self.local_piece(parameter.detach())) for name, parameter in self.parameters.items())
        return {name: piece for name, piece in pieces if piece is not None}

    @abstractmethod
    def local_piece(self, tensor: Any) -> Piece | None:
        """This rank's range of the flattened ``tensor``, as a view. None if it has no part of it."""

    def loaded(self, num_steps: int) -> None:
        skipped = 0.0
        if self.scaling is not None:
            self.policy.loss_scale, _, skipped = self.scaling.tolist()
        set_num_steps(self.optimizer, num_steps - int(skipped))


def whole(tensor: Tensor) -> Tensor:
    """All-gather a sharded tensor. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
