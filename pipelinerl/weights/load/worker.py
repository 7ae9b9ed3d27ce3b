"""vLLM's side of a weight update in each worker: stages and prepares in the background, swaps in place.

The engine implements vLLM's `WeightTransferEngine`, so vLLM's own endpoints can drive it, too. Our server drives it
through `WeightUpdateExtension`. Nothing touches the model before `finish_weight_update`.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.private_names import require_private_names
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.base_files import base_digest
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.load.adapter import AdapterSlots, hold_adapter
from pipelinerl.weights.load.average import Average
from pipelinerl.weights.load.learning import CPU, META, learn, learned, refuse_large
from pipelinerl.weights.load.live_check import LiveCheck, differing
from pipelinerl.weights.load.swap import Census, Swap, bare_model, captures_graphs, comparable, reload_in_place
from pipelinerl.weights.pinned import pinned
from pipelinerl.weights.protocol import Averaging, Failed, WeightCheck, WeightUpdateRequest
from pipelinerl.weights.staging_memory import fits_on_device
from pipelinerl.weights.transfer.checksum import checksum
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.shard import LoadPlan, Shard, StagedCopy, staged_copies, staged_wholes
from pipelinerl.weights.transfer.wire import LOOPBACK

log = logging.getLogger(__name__)


@dataclass
class StagedInitInfo(WeightTransferInitInfo):
    """Empty, because every update names its own sources."""


@dataclass
class StagedUpdateInfo(WeightTransferUpdateInfo):
    request: str
    """A `WeightUpdateRequest` as JSON."""


class StagedWeightTransferEngine(WeightTransferEngine[StagedInitInfo, StagedUpdateInfo]):
    """Receives into staging buffers, prepares while the live model decodes, swaps on request."""

    init_info_cls = StagedInitInfo
    update_info_cls = StagedUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        require_private_names("worker")
        manager = getattr(model, "lora_manager", None)
        self._slots = None if manager is None else AdapterSlots(manager)
        """The places of the adapter, where updates bring an adapter instead of the model's weights."""
        self._target = model if self._slots is None else self._slots
        """What a swap fills."""
        self._bare: Any = None
        self._swap: Swap | None = None
        self._unknown = self._find_swap()
        """Why there is no `Swap`, so that vLLM's own reload puts the weights into the model."""
        self._census = Census(self._target)
        self._copies: tuple[Layout, Shard | None, tuple[StagedCopy, ...]] | None = None
        parallel = vllm_config.parallel_config
        self._average: Average | None = None
        self._plan: tuple[Layout, LoadPlan] | None = None
        self._shard: tuple[Layout, tuple[int, ...], Shard | None] | None = None
        """What is staged of a layout whose stripes begin at these bytes. None = all."""
        self.check = LiveCheck()
        self._index = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.receiver = Receiver(
            index=self._index,
            host=os.environ.get("VLLM_HOST_IP") or LOOPBACK,
            secret=os.environ.get(SECRET_VARIABLE, ""),
            device=device,
            allocate=self._allocate,
            prepare=self._prepare,
            learn=self._learn_shard,
        )

    def init_transfer_engine(self, init_info: StagedInitInfo) -> None:
        """Does nothing: every update names its own sources."""

    def start_weight_update(self) -> None:
        """Does nothing: the model stays untouched until the swap."""

    def receive_weights(self, update_info: StagedUpdateInfo) -> None:
        transfer = self.receiver.begin(msgspec.json.decode(update_info.request, type=WeightUpdateRequest))
        transfer.ended.wait()
        if isinstance(transfer.end, Failed):
            raise WeightUpdateError(transfer.end.error)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        """Swaps the weights. Runs in the engine's loop while generation is paused."""
        layout, buffer = self.receiver.staged(self.receiver.transfer.request.version)
        before = self._census.take()
        if self._swap is not None:
            self._swap.swap()
        else:
            reload_in_place(self.model, self.model_config, layout.views(self._loaded(buffer)))
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the next transfer may then write into the buffer
        self._census.check(before, captures_graphs=captures_graphs(self.vllm_config))
        if self._average is not None:
            wrong = {*self._differing(self._comparable_copies(layout, buffer), buffer)}
            if wrong:
                raise WeightUpdateError(f"{min(wrong)} and {len(wrong) - 1} more are not the average")

    def shutdown(self) -> None:
        self.receiver.close()

    def average(self, averaging: Averaging) -> None:
        """Serves an average of the versions from now on."""
        self._average = Average(
            averaging,
            worker=self._index,
            workers=self.vllm_config.parallel_config.world_size,
            allocate=self._allocate,
        )

    def _loaded(self, staged: torch.Tensor) -> torch.Tensor:
        """Returns the bytes that the swap puts into the model, in the form of the staged ones."""
        return staged if self._average is None else self._average.buffer

    def _find_swap(self) -> str:
        """Makes the swap. Returns why that is not possible, else ""."""
        try:
            with set_current_vllm_config(self.vllm_config):
                self._bare = self._without_memory()
            self._swap = Swap.of(self._target, self._bare, self.model_config, self.device)
        except Exception as error:  # noqa: BLE001 — whatever a model raises that is made without memory
            log.warning("event=weights_are_reloaded reason=%s: %s", type(error).__name__, error)
            return str(error)
        return ""

    def _without_memory(self, device: torch.device = META) -> Any:
        """Returns what a swap fills, without its memory, or with memory on another device."""
        if self._slots is not None:
            return AdapterSlots(self._slots.manager, device)
        return bare_model(self.vllm_config, device)

    @torch.no_grad()
    def _prepare(self, layout: Layout, buffer: torch.Tensor) -> None:
        plan = self._plan_of(layout)
        if self._average is not None:
            key = self.receiver.staging.key
            assert key is not None, "bytes are staged before they are prepared"
            buffer = self._average.take(key, layout, self._shard_in(layout, buffer), buffer)
        if self._swap is not None:
            shard = self._shard_in(layout, buffer)
            wholes = staged_wholes(layout, plan, shard, buffer)
            self._swap.prepare(self._copies_of(layout, shard), buffer, plan.unlearned, wholes)

    def _learn_shard(self, layout: Layout, starts: Sequence[int]) -> Shard | None:
        """Returns the shard that this worker keeps of a version. None = all of it."""
        if self._shard is None or self._shard[:2] != (layout, tuple(starts)):
            plan = self._plan_of(layout)
            if self._swap is None:  # vLLM's reload takes whole tensors
                return None
            shard = Shard.of(layout, plan, starts)
            self._shard = (layout, tuple(starts), shard if shard.is_small else None)
            log.info(
                "event=shard_learned bytes=%d of=%d kept_whole=%d first=%s",
                *(shard.num_bytes, layout.num_bytes, len(shard.whole), next(iter(shard.whole), "none")),
            )
        return self._shard[2]

    def _shard_in(self, layout: Layout, buffer: torch.Tensor) -> Shard | None:
        """Returns the shard that is staged. None = the whole version, as from a store."""
        return self._shard[2] if self._shard is not None and buffer.numel() != layout.num_bytes else None

    def _copies_of(self, layout: Layout, shard: Shard | None) -> tuple[StagedCopy, ...]:
        if self._copies is None or self._copies[0] != layout or self._copies[1] is not shard:
            self._copies = (layout, shard, staged_copies(layout, self._plan_of(layout), shard))
        return self._copies[2]

    @torch.no_grad()
    def _plan_of(self, layout: Layout) -> LoadPlan:
        if self._plan is None or self._plan[0] != layout:
            self._plan = (layout, self._learn(layout))
        return self._plan[1]

    def _learn(self, layout: Layout) -> LoadPlan:
        with set_current_vllm_config(self.vllm_config):
            if self._swap is not None:
                return learned(self._bare, lambda: self._without_memory(CPU), layout)
            refuse_large(layout, self._unknown)
            try:
                return learn(self._bare, self._bare.load_weights, layout.specs)
            except Exception as error:  # noqa: BLE001 — whatever a model's loaders raise: the log-probabilities decide alone
                log.warning("event=load_plan_unknown error=%s: %s", type(error).__name__, error)
                return LoadPlan((), tuple(name for name, _ in self.model.named_parameters()))

    def _comparable_copies(self, layout: Layout, staged: torch.Tensor) -> list[StagedCopy]:
        live = self._comparable()
        return [one for one in self._copies_of(layout, self._shard_in(layout, staged)) if one.target in live]

    def _comparable(self) -> dict[str, torch.Tensor]:
        return comparable(self.model) if self._slots is None else dict(self._slots.named_buffers())

    def _differing(self, copies: Sequence[StagedCopy], staged: torch.Tensor) -> Iterator[str]:
        """Yields names of live parameters that are not what the swap should have made of the staged bytes."""
        yield from differing(copies, self._comparable(), self._loaded(staged))
        if self._swap is not None:
            yield from self._swap.unused()
        if self._slots is not None:
            yield from self._slots.unused()

    @torch.no_grad()
    def compare(self, version: int) -> WeightCheck:
        """Compares the live model with the staged bytes. It only reads and may run during decoding."""
        with self.receiver.staging.reading(version) as staged:
            if staged is None or self._plan is None:
                return WeightCheck(is_checked=False)
            layout, buffer = staged
            shard = self._shard_in(layout, buffer)
            copies = self._comparable_copies(layout, buffer)
            wrong, known = {*self._differing(copies, buffer)}, {one.target for one in copies}
            if self._swap is not None:
                known |= self._swap.packed
            unlearned = {name for name, _ in self._target.named_parameters()} - known
            whole = checksum(buffer) if shard is None else ""
        is_sent = self.receiver.is_sent(version, shard) if shard is not None else True
        if is_sent is False:
            wrong.add("the shard")
        return WeightCheck(
            is_checked=is_sent is not None,
            checksum=whole,
            differing=tuple(sorted(wrong)),
            unlearned=tuple(sorted(unlearned)),
            base=self._base_digest,
        )

    @cached_property
    def _base_digest(self) -> str:
        return "" if self._slots is None else base_digest(self.model_config.model)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self._swap is not None:
            self._swap.forget()
        if self.device.type == "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8)
        free, _ = torch.cuda.mem_get_info(self.device)
        is_on_device = fits_on_device(num_bytes, free, self.receiver.transfer.request.transport)
        log.info(
            "event=staging_allocated bytes=%d on=%s free=%d", num_bytes, "device" if is_on_device else "host", free
        )
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) if is_on_device else pinned(num_bytes)


class WeightUpdateExtension:
    """Methods that vLLM mixes into its worker (``--worker-extension-cls``). Called through ``collective_rpc``."""

    weight_transfer_engine: StagedWeightTransferEngine
    vllm_config: VllmConfig
    model_runner: Any
    """vLLM's."""

    def hold_adapter(self) -> None:
        """Makes room for the adapter of every request. Called after vLLM's warm-up, which removes adapters."""
        hold_adapter(self.model_runner.lora_manager)

    def average_weights(self, *averaging: Any) -> None:
        """Makes the server a teacher that serves an average of the versions it takes. The values of an `Averaging`."""
        self.weight_transfer_engine.average(Averaging(*averaging))

    def weight_address(self) -> tuple[str, int]:
        """Returns the address at which this worker sends and receives weights."""
        address = self.weight_transfer_engine.receiver.address
        return address.host, address.port

    def weight_check(self, version: int) -> dict[str, Any] | None:
        """Returns a `WeightCheck` of ``version`` as a dict, or None while the comparison runs."""
        engine = self.weight_transfer_engine
        result = engine.check.result(version, lambda: engine.compare(version))
        return None if result is None else msgspec.to_builtins(result)

    def swap_weights(self, version: int) -> None:
        """Makes the staged version the live one. Generation must be paused."""
        engine = self.weight_transfer_engine
        engine.receiver.staged(version)
        with set_current_vllm_config(self.vllm_config):
            engine.finish_weight_update()
        engine.check.is_live(version, lambda: engine.compare(version))
