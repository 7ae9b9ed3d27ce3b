"""The places of a model's parameters in one flat buffer.

Both ends compute the same `Layout` from the same parameter list, so an update needs to send only the buffer's bytes.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

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


class StripeBuffer:
    """A part of the flat buffer, allocated once and filled with the parameters of one version after another.

    Args:
        buffer: flat uint8, bytes ``first`` … of the flat buffer. ``first`` is a multiple of ``ALIGNMENT``.
    """

    def __init__(self, layout: Layout, buffer: torch.Tensor, first: int = 0):
        self.layout, self.buffer, self.first = layout, buffer, first
        self._places = [
            _place(spec, offset, buffer, first) for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ]

    @torch.no_grad()
    def fill(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies the stripe out of all parameters, given in the layout's order.

        Args:
            params: read one by one, and only the part that lies in the stripe is copied.
        Raises:
            WeightUpdateError: a parameter is missing, extra, or differs in name, shape or dtype.
        """
        places = iter(self._places)
        for name, tensor in params:
            place = next(places, None)
            if place is None or name != place.spec.name:
                raise WeightUpdateError(f"parameter {name!r} came where the layout has {place and place.spec.name!r}")
            if tensor.shape != place.spec.shape or tensor.dtype != place.dtype:
                raise WeightUpdateError(
                    f"parameter {name!r} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"the layout says {place.dtype} {place.spec.shape}"
                )
            if place.target.numel():
                part = tensor if place.part is None else tensor.reshape(-1)[place.part]
                place.target.copy_(part, non_blocking=True)
        if missing := next(places, None):
            raise WeightUpdateError(f"parameter {missing.spec.name!r} did not come")


class ParamPlace(NamedTuple):
    """A parameter's place in a stripe."""

    spec: ParamSpec
    dtype: torch.dtype
    target: torch.Tensor
    """The stripe's memory. Empty if the parameter lies in other stripes."""
    part: slice | None
    """Elements of the flattened parameter that the stripe has. None = all, and ``target`` has the parameter's shape."""


def _place(spec: ParamSpec, offset: int, buffer: torch.Tensor, first: int) -> ParamPlace:
    dtype, end = torch_dtype(spec.dtype), offset + spec_bytes(spec)
    low, high = (min(max(edge, first), first + buffer.numel()) for edge in (offset, end))
    target = buffer[low - first : high - first].view(dtype)
    if (low, high) == (offset, end):
        return ParamPlace(spec, dtype, target.view(spec.shape), None)
    return ParamPlace(spec, dtype, target, slice((low - offset) // dtype.itemsize, (high - offset) // dtype.itemsize))


def spec_of(name: str, tensor: torch.Tensor) -> ParamSpec:
    """Returns the spec of a parameter from its dtype and shape (a sharded tensor reports its full shape)."""
    return ParamSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def spec_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
