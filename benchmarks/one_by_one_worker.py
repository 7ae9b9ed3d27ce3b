"""Baseline of ``weight_update.py``: the worker's side of an update that moves one tensor at a time."""

import time
from typing import Any

import msgspec
import torch
from pipelinerl.weights.group import connect
from vllm.config import set_current_vllm_config

from pipelinerl.weights.layout import torch_dtype
from pipelinerl.weights.protocol import WeightUpdateRequest
from pipelinerl.weights.twin import reload_in_place
from pipelinerl.weights.worker import WeightUpdateExtension


class OneByOneExtension(WeightUpdateExtension):
    """Receives and loads tensor after tensor while generation is paused."""

    @torch.no_grad()
    def load_one_by_one(self, encoded: str) -> None:
        request = msgspec.json.decode(encoded, type=WeightUpdateRequest)
        deadline = time.monotonic() + request.timeout_s
        group = self.__dict__.get("_baseline_group")
        if group is None:
            group = connect(request.group, 1, torch.device("cpu"), deadline, lambda: None)
            self.__dict__["_baseline_group"] = group

        def receive() -> Any:
            for spec in request.params:
                tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
                group.broadcast(tensor, deadline, lambda: None)
                yield spec.name, tensor

        with set_current_vllm_config(self.vllm_config):
            model = self.model_runner.get_model()
            reload_in_place(model, self.weight_transfer_engine.model_config, receive())
