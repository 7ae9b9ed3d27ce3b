"""vLLM's side of a weight update in each worker: stages and prepares in the background, swaps in place.

The engine implements vLLM's `WeightTransferEngine`, so vLLM's own endpoints can drive it too (`update_weights` then
waits for the bytes). Our server drives it through `WeightUpdateExtension`, which blocks the engine loop only for the
swap. Nothing touches the model before `finish_weight_update`, so a sender may die at any point before it.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.load.live_check import LiveCheck, differing, learn, learned
from pipelinerl.weights.load.shadow_copy import ShadowCopy, bare_model, comparable, reload_in_place
from pipelinerl.weights.protocol import Failed, WeightCheck, WeightUpdateRequest
from pipelinerl.weights.transfer.checksum import checksum
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.weights.transfer.shard import LoadPlan, Shard, ShardViews
from pipelinerl.weights.transfer.wire import LOOPBACK

log = logging.getLogger(__name__)

DEVICE_RESERVE_BYTES = 1 << 30
"""Device memory that staging keeps free. A model that does not fit is staged in pinned host memory."""


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
        self._shadow = ShadowCopy.of(model, vllm_config) if device.type == "cpu" else None
        parallel = vllm_config.parallel_config
        self._plan: tuple[Layout, LoadPlan] | None = None
        self._shard: tuple[Layout, tuple[int, ...], Shard | None] | None = None
        """What is staged of a layout whose stripes begin at these bytes. None = all."""
        self.check = LiveCheck()
        self.receiver = Receiver(
            index=parallel.data_parallel_index * parallel.world_size + parallel.rank,
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
        if self._shadow is not None:
            self._shadow.swap()
        else:
            reload_in_place(self.model, self.model_config, self._tensors(layout, buffer).items())
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the next transfer may then write into the buffer

    def shutdown(self) -> None:
        self.receiver.close()

    @torch.no_grad()
    def _prepare(self, layout: Layout, buffer: torch.Tensor) -> None:
        plan = self._plan_of(layout)
        if self._shadow is not None:
            self._shadow.load(self._tensors(layout, buffer), plan)

    def _learn_shard(self, layout: Layout, starts: Sequence[int]) -> Shard | None:
        """Returns the shard that this worker keeps of a version. None = all of it."""
        if self._shard is None or self._shard[:2] != (layout, tuple(starts)):
            shard = Shard.of(layout, self._plan_of(layout), starts)
            self._shard = (layout, tuple(starts), shard if shard.is_small else None)
            log.info(
                "event=shard_learned bytes=%d of=%d kept_whole=%d first=%s",
                *(shard.num_bytes, layout.num_bytes, len(shard.whole), next(iter(shard.whole), "none")),
            )
        return self._shard[2]

    def _tensors(self, layout: Layout, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Returns the staged tensors. Those of a shard are defined where this worker reads them."""
        shard = self._shard_in(layout, buffer)
        return dict(layout.views(buffer)) if shard is None else ShardViews(shard, buffer)

    def _shard_in(self, layout: Layout, buffer: torch.Tensor) -> Shard | None:
        """Returns the shard that is staged. None = the whole version, as from a store."""
        return self._shard[2] if self._shard is not None and buffer.numel() != layout.num_bytes else None

    @torch.no_grad()
    def _plan_of(self, layout: Layout) -> LoadPlan:
        if self._plan is None or self._plan[0] != layout:
            self._plan = (layout, learned(lambda: self._learn(layout), self.model, layout.specs))
        return self._plan[1]

    def _learn(self, layout: Layout) -> LoadPlan:
        if self._shadow is not None:
            return self._shadow.learn(layout.specs)
        with set_current_vllm_config(self.vllm_config):
            model = bare_model(self.vllm_config)
            return learn(model, model.load_weights, layout.specs)

    @torch.no_grad()
    def compare(self, version: int) -> WeightCheck:
        """Compares the live model with the staged bytes. It only reads and may run during decoding."""
        with self.receiver.staging.reading(version) as staged:
            if staged is None or self._plan is None:
                return WeightCheck(is_checked=False)
            layout, buffer = staged
            plan, live = self._plan[1], comparable(self.model)
            packed = self._shadow.packed if self._shadow is not None else frozenset()
            copies = [copy for copy in plan.copies if copy.target in live]
            wrong = {*differing(copies, live, self._tensors(layout, buffer))}
            if self._shadow is not None:
                wrong |= {*self._shadow.unused()}
            known = {copy.target for copy in plan.copies} & (live.keys() | packed)
            unlearned = {name for name, _ in self.model.named_parameters()} - known
            shard = self._shard_in(layout, buffer)
            whole = checksum(buffer) if shard is None else ""
        is_sent = self.receiver.is_sent(version, shard) if shard is not None else True
        if is_sent is False:
            wrong.add("the shard")
        return WeightCheck(
            is_checked=is_sent is not None,
            checksum=whole,
            differing=tuple(sorted(wrong)),
            unlearned=tuple(sorted(unlearned)),
        )

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return torch.zeros(num_bytes, dtype=torch.uint8)
        free, _ = torch.cuda.mem_get_info(self.device)
        if free > num_bytes + DEVICE_RESERVE_BYTES:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


class WeightUpdateExtension:
    """Methods that vLLM mixes into its worker (``--worker-extension-cls``). Called through ``collective_rpc``."""

    weight_transfer_engine: StagedWeightTransferEngine
    vllm_config: VllmConfig
    model_runner: Any

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
        self.model_runner.reset_lora_state()
        engine.check.is_live(version, lambda: engine.compare(version))
