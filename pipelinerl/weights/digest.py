"""Checks exactly that the live tensors are the sent bytes, also for updates too small for log-probabilities to show.

The proof has two steps. The `checksum` of the staged bytes equals the trainer's, so the right bytes arrived.
`differing` finds no live tensor that differs from its staged bytes, so they are in use. `learn` finds out once which
live elements come from which bytes: it runs the model's own loaders on tensors without memory and records every copy.
Values that a loader computes instead of copying are not learned. Only the log-probabilities check those.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelinerl.weights.layout import torch_dtype
from pipelinerl.weights.protocol import ParamSpec

log = logging.getLogger(__name__)

WIDTH = 1024
"""Words in a row of the checksum's matrix."""
ROW_BYTES = 8 * WIDTH
CPU_ROWS, GPU_ROWS = 64, 1 << 14
"""Rows per step. Those of the CPU fit into its cache."""


def checksum(buffer: torch.Tensor, first: int = 0) -> str:
    """Returns the hexadecimal digest of a flat uint8 tensor whose length is a multiple of 8.

    The 64-bit words are the rows of a matrix of width 1024, the last one filled with zeros. The digest is the sum of
    the words times their row (from 1) and of the words times their column (from 1), modulo 2⁶⁴. So the digest of a
    whole is the sum of its stripes' digests (``added``).

    Args:
        first: place of the first byte in the whole, a multiple of ``ROW_BYTES``.
    """
    words = buffer.view(torch.int64)
    whole = len(words) // WIDTH * WIDTH
    parts = list(words[:whole].view(-1, WIDTH).split(GPU_ROWS if buffer.is_cuda else CPU_ROWS))
    if whole < len(words):
        parts.append(torch.nn.functional.pad(words[whole:], (0, whole + WIDTH - len(words)))[None])
    columns = torch.zeros(WIDTH, dtype=torch.int64, device=buffer.device)
    row_sums = [columns[:0]]
    for part in parts:
        row_sums.append(part.sum(1))
        columns += part.sum(0)
    rows = torch.cat(row_sums)
    by_row = int((rows * _places(rows, 1 + first // ROW_BYTES)).sum())
    by_column = int((columns * _places(columns, 1)).sum())
    return "".join(f"{total % 2**64:016x}" for total in (by_row, by_column))


def added(digests: Iterable[str]) -> str:
    """Returns the checksum of a whole from the checksums of its stripes."""
    halves = [(int(digest[:16], 16), int(digest[16:], 16)) for digest in digests]
    return "".join(f"{sum(column) % 2**64:016x}" for column in zip(*halves, strict=True))


def _places(sums: torch.Tensor, first: int) -> torch.Tensor:
    return torch.arange(first, first + len(sums), device=sums.device)


@dataclass(frozen=True)
class View:
    """Elements of a tensor's storage."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class Copy:
    """An assignment by a loader: elements of a live parameter are copies of elements of a sent one."""

    target: str
    target_view: View
    source: str
    source_view: View


@dataclass(frozen=True)
class LoadPlan:
    """Origin of a model's parameters."""

    copies: tuple[Copy, ...]
    unlearned: tuple[str, ...]
    """Live parameters that are not pure copies of sent parameters."""
    computed: frozenset[str] = frozenset()
    """Sent parameters that a loader computes with, or of which nobody knows where they go."""

    @classmethod
    def unknown(cls, model: nn.Module, specs: Sequence[ParamSpec]) -> "LoadPlan":
        """Returns the plan of a model whose loaders cannot run without memory."""
        return cls((), tuple(name for name, _ in model.named_parameters()), frozenset(spec.name for spec in specs))


class _Recorder(TorchDispatchMode):
    """Records every assignment to an existing tensor, and which sent tensors go elsewhere.

    Args:
        sent: names of the sent tensors by their storage.
    """

    def __init__(self, sent: Mapping[int, str]) -> None:
        super().__init__()
        self._sent = sent
        self.assignments: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.computed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.assignments.append((args[0], args[1]))
            return result
        if not func.is_view:
            given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
            self.computed |= {self._sent[storage] for storage in given & self._sent.keys()}
        return result


def learn(
    model: nn.Module, load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any], specs: Sequence[ParamSpec]
) -> LoadPlan:
    """Returns the load plan of a model without memory (device `meta`).

    Args:
        load: the model's own function for loading named tensors, e.g. ``model.load_weights``.
        specs: parameters as they are sent.
    """
    sources = [(spec.name, torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")) for spec in specs]
    sent = {_storage(tensor): name for name, tensor in sources}
    live = {_storage(parameter): name for name, parameter in model.named_parameters()}
    with _Recorder(sent) as recorder:
        load(iter(sources))
    copies, computed, used = [], set(), recorder.computed
    for target, source in recorder.assignments:
        name, origin = live.get(_storage(target)), source is not None and sent.get(_storage(source))
        if name is None:
            used |= {origin} if origin else set()
            continue
        if origin:
            assert source is not None
            copies.append(Copy(name, View.of(target), origin, View.of(source)))
        else:
            computed.add(name)
    copied = {copy.target for copy in copies} - computed
    used |= {copy.source for copy in copies if copy.target in computed}
    unlearned = tuple(sorted(set(live.values()) - copied))
    if set(unlearned) - computed:  # they may be replaced as a whole, by any tensor that is not copied
        used |= {*sent.values()} - {copy.source for copy in copies}
    return LoadPlan(tuple(copy for copy in copies if copy.target in copied), unlearned, frozenset(used))


def learned(learning: Callable[[], LoadPlan], model: nn.Module, specs: Sequence[ParamSpec]) -> LoadPlan:
    """Returns what ``learning`` returns, or the plan of unknown loaders if it fails.

    A loader that looks at values, for instance, cannot run without memory. Then all tensors are kept whole.
    """
    try:
        return learning()
    except Exception as error:  # whatever a model's loaders raise: the log-probabilities decide alone
        log.warning("event=load_plan_unknown error=%s: %s", type(error).__name__, error)
        return LoadPlan.unknown(model, specs)


def differing(
    copies: Iterable[Copy], live: Mapping[str, torch.Tensor], staged: Mapping[str, torch.Tensor]
) -> Iterator[str]:
    """Yields names of live parameters that differ in any bit from the staged ones, cast to the live dtype."""
    for copy in copies:
        target = copy.target_view.read(live[copy.target])
        source = copy.source_view.read(staged[copy.source]).to(target)
        if not _same_bits(target, source):
            yield copy.target


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _storage(tensor: torch.Tensor) -> int:
    """Returns the identity of the storage, also for tensors without memory."""
    return tensor.untyped_storage()._cdata
