"""Checks exactly that the live tensors are the sent bytes, also for updates too small for log-probabilities to show.

The check has two steps. The checksum of the staged bytes equals the trainer's, so the right bytes arrived. `differing`
finds no live tensor that differs from its staged bytes, so they are in use. `learn` finds out once which live elements
come from which bytes: it runs the model's own loaders on tensors without memory and records every copy. Values that a
loader computes instead of copying are not learned. Only the log-probabilities check those.

`LiveCheck` compares every version that becomes live, in the background.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipelinerl.weights.layout import torch_dtype
from pipelinerl.weights.protocol import ParamSpec, WeightCheck
from pipelinerl.weights.transfer.shard import Copy, LoadPlan, View

log = logging.getLogger(__name__)


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
    except Exception as error:  # noqa: BLE001 — whatever a model's loaders raise: the log-probabilities decide alone
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
    return tensor.untyped_storage()._cdata  # noqa: SLF001 — the identity of a storage without memory


COMPARED = 32
"""Versions whose comparison is remembered."""


@dataclass(eq=False)
class LiveComparison:
    """One comparison of the live model with the bytes of a version."""

    result: WeightCheck | None = None
    """None while it runs."""


class LiveCheck:
    """Compares versions in a thread, so that the engine's loop is not blocked, one at a time.

    From the first question on, every version is compared as soon as it is live. So no version is replaced before it was
    compared, however late the question about it comes.
    """

    def __init__(self) -> None:
        self._comparisons: dict[int, LiveComparison] = {}
        """The newest `COMPARED`, by version."""
        self._thread: threading.Thread | None = None
        self._is_asked = False

    def is_live(self, version: int, compare: Callable[[], WeightCheck]) -> None:
        """Starts comparing a version that has just become live, if the trainer asks for such comparisons."""
        if self._is_asked:
            self._begin(version, compare)

    def result(self, version: int, compare: Callable[[], WeightCheck]) -> WeightCheck | None:
        """Returns the result for a version, None while the comparison runs. Starts it if that is missing."""
        self._is_asked = True
        if version not in self._comparisons:
            self._begin(version, compare)
        return self._comparisons[version].result

    def _begin(self, version: int, compare: Callable[[], WeightCheck]) -> None:
        self._comparisons.pop(version, None)
        self._comparisons[version] = comparison = LiveComparison()
        while len(self._comparisons) > COMPARED:
            del self._comparisons[next(iter(self._comparisons))]
        args = (comparison, compare, self._thread)
        self._thread = threading.Thread(target=_compare, args=args, name="weight-check", daemon=True)
        self._thread.start()


def _compare(comparison: LiveComparison, compare: Callable[[], WeightCheck], previous: threading.Thread | None) -> None:
    if previous is not None:
        previous.join()
    started = time.monotonic()
    try:
        result = compare()
    except Exception as error:  # the thread's boundary: nothing was verified
        log.exception("event=weight_check_failed")
        result = WeightCheck(is_checked=True, differing=(f"the comparison failed: {error}",))
    comparison.result = msgspec.structs.replace(result, check_ms=1e3 * (time.monotonic() - started))
