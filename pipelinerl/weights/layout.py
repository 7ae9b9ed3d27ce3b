"""The places of a model's parameters in one flat buffer.

Both ends compute the same `Layout` from the same parameter list, so an update needs to send only the buffer's bytes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import ParamSpec

ALIGNMENT = 64
"""Bytes. Every parameter starts at a multiple of this, so that it can be viewed in any dtype."""


@dataclass(frozen=True)
class Layout:
    """Places of parameters in the flat buffer, in the order of the list."""

    specs: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        names = {spec.name for spec in self.specs}
        if len(names) != len(self.specs):
            raise WeightUpdateError(f"{len(self.specs)} parameters have only {len(names)} different names")

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each parameter starts."""
        return tuple(self._edges[:-1])

    @cached_property
    def num_bytes(self) -> int:
        return self._edges[-1]

    @cached_property
    def _edges(self) -> list[int]:
        edges = [0]
        for spec in self.specs:
            edges.append(edges[-1] + -(-spec_bytes(spec) // ALIGNMENT) * ALIGNMENT)
        return edges

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, view of the flat uint8 buffer) of each parameter."""
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            flat = buffer[offset : offset + spec_bytes(spec)]
            yield spec.name, flat.view(torch_dtype(spec.dtype)).view(spec.shape)

    def fill(self, stripe: torch.Tensor, params: Iterable[tuple[str, torch.Tensor]], *, first: int = 0) -> None:
        """Copies one stripe of the flat buffer out of all parameters, given in the layout's order.

        Args:
            stripe: flat uint8, bytes ``first`` … of the flat buffer. ``first`` is a multiple of ``ALIGNMENT``.
            params: read one by one, and only the part that lies in the stripe is copied.
        Raises:
            WeightUpdateError: a parameter is missing, extra, or differs in name, shape or dtype.
        """
        places = iter(zip(self.specs, self.offsets, strict=True))
        for name, tensor in params:
            spec, offset = next(places, (None, 0))
            if spec is None or name != spec.name:
                raise WeightUpdateError(f"parameter {name!r} came where the layout has {spec and spec.name!r}")
            if tuple(tensor.shape) != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
                raise WeightUpdateError(
                    f"parameter {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the layout says {torch_dtype(spec.dtype)} {spec.shape}"
                )
            low, high = max(offset, first), min(offset + spec_bytes(spec), first + stripe.numel())
            if low < high:
                target = stripe[low - first : high - first].view(tensor.dtype)
                start = (low - offset) // tensor.itemsize
                flat = tensor.detach().reshape(-1)
                target.copy_(flat[start : start + target.numel()], non_blocking=True)
        missing, _ = next(places, (None, 0))
        if missing is not None:
            raise WeightUpdateError(f"parameter {missing.name!r} did not come")


def spec_of(name: str, tensor: torch.Tensor) -> ParamSpec:
    """Returns the spec of a parameter from its dtype and shape (a sharded tensor reports its full shape)."""
    return ParamSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def spec_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
