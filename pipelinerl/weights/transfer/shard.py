"""The part of a version that one worker keeps: the bytes that vLLM's own loaders copy into its parameters. Pure.

The elements of a load plan (`load.learning.learn`) become runs of bytes at equal distances in the version, which lie
one after the other in the shard. What a loader computes with is kept whole.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise

import msgspec
import torch

from pipelinerl.weights.layout import ALIGNMENT, Layout, spec_bytes, torch_dtype
from pipelinerl.weights.protocol import ParamSpec, Runs
from pipelinerl.weights.transfer.delta import changed_words
from pipelinerl.weights.transfer.wire import WireError


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
    """Sent parameters that a loader computes with, or whose use is unknown."""


@dataclass(frozen=True)
class StagedCopy:
    """An assignment by a loader, out of the bytes that are staged."""

    target: str
    target_view: View
    dtype: torch.dtype
    source_view: View
    """Of the staged bytes, as elements of ``dtype``."""

    def source(self, staged: torch.Tensor) -> torch.Tensor:
        """Returns the elements, as a view of the flat uint8 buffer."""
        return self.source_view.read(staged.view(self.dtype))


WHOLE_SHARE = 0.9
"""A shard that is not smaller than this share of the version is not worth gathering: the version is kept whole."""


@dataclass(frozen=True)
class Shard:
    """What a worker keeps of a layout."""

    layout: Layout
    stripes: Mapping[int, tuple[Runs, ...]]
    """First byte of each stripe → runs in it, in the order of their places."""
    kept: Mapping[str, tuple[Runs, ...]]
    """Sent tensor → its runs, which are not cut by stripes: each lies in the shard without a gap."""
    whole: tuple[str, ...] = ()
    """Sent tensors that are kept whole, because a loader computes with them."""

    @classmethod
    def of(cls, layout: Layout, plan: LoadPlan, starts: Sequence[int]) -> "Shard":
        """Returns the shard of a worker whose loaders do what the plan says.

        Args:
            starts: first byte of each stripe, rising.
        """
        wanted: dict[str, set[Runs]] = defaultdict(set)
        sizes = {spec.name: torch_dtype(spec.dtype).itemsize for spec in layout.specs}
        for copy in plan.copies:
            if 0 not in copy.source_view.size:  # a worker that has only the padding of a vocabulary copies no row
                wanted[copy.source].add(runs_of(copy.source_view, sizes[copy.source]))
        edges, whole = [*starts, layout.num_bytes], plan.computed
        kept = _kept(layout, wanted, whole)
        stripes, torn = _placed(kept, edges)
        if torn:  # a run with a gap in the shard would be no view of it
            kept = _kept(layout, wanted, whole | torn)
            stripes, torn = _placed(kept, edges)
            assert not torn
        placed = {part.first: part.place for parts in stripes.values() for part in parts}
        return cls(
            layout,
            stripes,
            {
                name: tuple(msgspec.structs.replace(run, place=placed[run.first]) for run in runs)
                for name, runs in kept.items()
            },
            tuple(sorted(whole)),
        )

    @cached_property
    def num_bytes(self) -> int:
        return max(map(end_of, self.stripes.values()), default=0)

    @cached_property
    def name(self) -> str:
        """Equal for workers that keep the same bytes."""
        return hashlib.sha256(msgspec.json.encode((self.layout.specs, list(self.stripes.values())))).hexdigest()[:16]

    @property
    def is_small(self) -> bool:
        """Whether it is worth keeping instead of the whole version."""
        return self.num_bytes < WHOLE_SHARE * self.layout.num_bytes

    def place(self, start: int) -> tuple[int, int]:
        """Returns the bytes (start, end) of the shard that the stripe from ``start`` on fills."""
        runs = self.stripes[start]
        return (runs[0].place, end_of(runs)) if runs else (0, 0)

    def apply_delta(self, shard: torch.Tensor, payload: torch.Tensor, start: int, end: int) -> None:
        """Applies the difference of the stripe ``start`` … ``end`` to what the shard keeps of it.

        Raises:
            ValueError: the payload is malformed.
        """
        places, values = changed_words(payload, (end - start) // 2)
        places += start // 2
        words = shard.view(torch.int16)
        for runs in self.stripes[start]:
            low, high = torch.searchsorted(places, torch.tensor([runs.first // 2, -(-runs.end // 2)])).tolist()
            behind = 2 * places[low:high] - runs.first
            row, rest = behind // runs.stride, behind % runs.stride
            inside = rest < runs.length
            targets = (runs.place + row * runs.length + rest)[inside] // 2
            words[targets.to(words.device)] = values[low:high][inside].to(words.device)


def staged_copies(layout: Layout, plan: LoadPlan, shard: Shard | None) -> tuple[StagedCopy, ...]:
    """Returns where each copy of the plan finds its elements in the staged bytes. ``shard``: None = all are staged."""
    places = {spec.name: (spec, first) for spec, first in zip(layout.specs, layout.offsets, strict=True)}
    copies = []
    for copy in plan.copies:
        if 0 in copy.source_view.size:
            continue
        spec, first = places[copy.source]
        dtype = torch_dtype(spec.dtype)
        runs = Runs(first, first, spec_bytes(spec), spec_bytes(spec), 1)
        if shard is not None:
            runs = _holding(shard.kept[copy.source], runs_of(copy.source_view, dtype.itemsize), first)
        view = _within(runs, copy.source_view, first, dtype.itemsize)
        copies.append(StagedCopy(copy.target, copy.target_view, dtype, view))
    return tuple(copies)


def staged_wholes(layout: Layout, plan: LoadPlan, shard: Shard | None, staged: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the tensors that loaders compute with, as views of the staged bytes."""
    wholes = {}
    for spec, first in zip(layout.specs, layout.offsets, strict=True):
        if spec.name in plan.computed:
            kept = () if shard is None else shard.kept[spec.name]
            place = first if shard is None else kept[0].place if kept else 0
            flat = staged[place : place + spec_bytes(spec)]
            wholes[spec.name] = flat.view(torch_dtype(spec.dtype)).view(spec.shape)
    return wholes


def end_of(runs: Sequence[Runs]) -> int:
    """Returns the end in the shard of runs that begin at multiples of the alignment, in rising order."""
    return -(-(runs[-1].place + runs[-1].num_bytes) // ALIGNMENT) * ALIGNMENT if runs else 0


def gather_runs(runs: Sequence[Runs], stripe: torch.Tensor, first: int, start: int, end: int) -> torch.Tensor:
    """Returns bytes ``start`` … ``end`` of the shard that these runs make up.

    Args:
        runs: in the order of their places.
        stripe: flat uint8, bytes ``first`` … of the version.
    Raises:
        WireError: the runs do not have these bytes, or one lies outside the stripe.
    """
    if not runs or not runs[0].place <= start < end <= end_of(runs):
        raise WireError(f"bytes {start} to {end} of a shard were asked for with {len(runs)} runs")
    bucket = torch.zeros(end - start, dtype=torch.uint8, device=stripe.device)
    index = max(bisect_right(runs, start, key=lambda r: r.place) - 1, 0)
    while index < len(runs) and runs[index].place < end:
        part = runs[index]
        low, high = max(start - part.place, 0), min(end - part.place, part.num_bytes)
        if part.first < first or part.end > first + stripe.numel():
            raise WireError(f"bytes {part.first} to {part.end} are not in a stripe of {stripe.numel()} from {first}")
        if low < high:
            _copy_bytes(part, stripe, first, low, bucket[part.place + low - start : part.place + high - start])
        index += 1
    return bucket


def runs_of(view: View, itemsize: int) -> Runs:
    """Returns runs that hold all elements of a view. They may hold others, if the view is sliced in two dimensions."""
    dims = sorted(((stride, size) for stride, size in zip(view.stride, view.size, strict=True) if size > 1 and stride))
    length = 1
    while dims and dims[0][0] <= length:  # contiguous, or overlapping
        stride, size = dims.pop(0)
        length += stride * (size - 1)
    while len(dims) > 1 and dims[1][0] > dims[0][0] * dims[0][1]:
        stride, size = dims.pop(0)
        length += stride * (size - 1)
    count, outer = 1, dims[0][0] if dims else length
    for stride, size in dims:
        if stride != outer * count:  # unequal distances: one run over all
            length += sum(step * (number - 1) for step, number in dims)
            count, outer = 1, length
            break
        count *= size
    return Runs(0, view.offset * itemsize, length * itemsize, outer * itemsize, count)


def _strided(runs: Runs, flat: torch.Tensor, first: int, low: int, high: int) -> torch.Tensor:
    """Returns runs number ``low`` … ``high`` as a view [high − low, length] of bytes ``first`` … of the version."""
    offset = flat.storage_offset() + runs.first + low * runs.stride - first
    return flat.as_strided((high - low, runs.length), (runs.stride, 1), offset)


def _copy_bytes(runs: Runs, stripe: torch.Tensor, first: int, start: int, target: torch.Tensor) -> None:
    """Copies bytes ``start`` … of the runs into ``target``, which may begin and end within a run."""
    end, length = start + target.numel(), runs.length
    low, high = -(-start // length), end // length
    edges = {start, end} if low > high else {start, low * length, high * length, end}
    for a, b in pairwise(sorted(edges)):
        if a == low * length and b == high * length:
            target[a - start : b - start].view(high - low, length).copy_(_strided(runs, stripe, first, low, high))
        else:
            at = runs.first + a // length * runs.stride + a % length - first
            target[a - start : b - start].copy_(stripe[at : at + b - a])


def _holding(kept: Sequence[Runs], wanted: Runs, first: int) -> Runs:
    """Returns those of a tensor's runs that hold the wanted ones. ``first``: of the tensor, in the version."""
    wanted = msgspec.structs.replace(wanted, first=wanted.first + first)
    same = (run for run in kept if msgspec.structs.replace(run, place=0) == wanted)
    return next(same, None) or next(run for run in kept if run.count == 1)


def _within(runs: Runs, view: View, first: int, itemsize: int) -> View:
    """Returns a tensor's view as one of the shard. ``runs`` hold it. ``first``: of the tensor, in the version."""
    behind = first + view.offset * itemsize - runs.first
    if runs.count == 1:
        return View((runs.place + behind) // itemsize, view.size, view.stride)
    row, rest = divmod(behind, runs.stride)
    steps = (step * itemsize for step in view.stride)
    stride = (step // runs.stride * runs.length if step >= runs.stride else step for step in steps)
    offset = (runs.place + row * runs.length + rest) // itemsize
    return View(offset, view.size, tuple(step // itemsize for step in stride))


def _kept(layout: Layout, wanted: Mapping[str, set[Runs]], whole: Set[str]) -> dict[str, tuple[Runs, ...]]:
    """Returns the runs of every tensor, without their places in the shard."""
    kept = {}
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        runs = _disjoint(spec, sorted(wanted.get(spec.name, ()), key=lambda r: r.first), is_whole=spec.name in whole)
        kept[spec.name] = tuple(msgspec.structs.replace(part, first=part.first + offset) for part in runs)
    return kept


def _placed(kept: Mapping[str, Sequence[Runs]], edges: Sequence[int]) -> tuple[dict[int, tuple[Runs, ...]], set[str]]:
    """Cuts runs into the stripes between ``edges``, and gives them places one after the other, stripe by stripe.

    Returns:
        The runs of each stripe, and the tensors with a run that has a gap in the shard where it was cut.
    """
    cuts: list[list[tuple[str, Runs, Runs]]] = [[] for _ in edges[1:]]
    for name, runs in kept.items():
        for run in runs:
            for stripe in range(bisect_right(edges, run.first) - 1, bisect_left(edges, run.end)):
                cuts[stripe] += ((name, run, part) for part in _cut(run, *edges[stripe : stripe + 2]))
    place, stripes, torn = 0, {}, set()
    ends: dict[Runs, int] = {}
    for start, parts in zip(edges, cuts, strict=False):
        placed = []
        for name, run, part in parts:
            if ends.get(run, place) != place:
                torn.add(name)
            placed.append(msgspec.structs.replace(part, place=place))
            ends[run] = place + part.num_bytes
            place = end_of(placed)
        stripes[start] = tuple(placed)
    return stripes, torn


def _cut(runs: Runs, start: int, end: int) -> Iterator[Runs]:
    """Yields what lies in bytes ``start`` … ``end`` of the version."""
    low = min(max(-(-(start - runs.first) // runs.stride), 0), runs.count)
    high = min(max((end - runs.first - runs.length) // runs.stride + 1, low), runs.count)
    for row, count in ((low - 1, 1), (low, high - low), (high, 1)):
        at = runs.first + row * runs.stride
        first, last = max(at, start), min(at + (count - 1) * runs.stride + runs.length, end)
        if 0 <= row < runs.count and count > 0 and first < last:
            length = runs.length if count > 1 else last - first
            yield Runs(0, first, length, max(runs.stride, length), count)


def _disjoint(spec: ParamSpec, wanted: list[Runs], *, is_whole: bool) -> list[Runs]:
    """Returns the runs of one tensor, or one run over it all if they overlap, or cut a 16-bit word."""
    num_bytes = spec_bytes(spec)
    whole = [Runs(0, 0, num_bytes, num_bytes, 1)] if num_bytes else []
    is_cut = any(number % 2 for runs in wanted for number in (runs.first, runs.length, runs.stride))
    if is_whole or is_cut or sum(runs.num_bytes for runs in wanted) >= num_bytes or _overlap(wanted):
        return whole
    return wanted


def _overlap(wanted: list[Runs]) -> bool:
    """Whether two of the runs, sorted by their first bytes, share bytes. In doubt they do."""
    return any(before.end > after.first and not _interleave(before, after) for before, after in combinations(wanted, 2))


def _interleave(before: Runs, after: Runs) -> bool:
    """Whether ``after`` lies in the gaps of ``before``."""
    gap = range(before.first + before.length, before.first + before.stride + 1)
    return before.stride == after.stride and after.first in gap and after.first + after.length in gap
