"""Baseline of ``weight_update.py``: the worker's side of an update that moves one tensor at a time."""

import os
from typing import Any

import msgspec
import torch
from vllm.config import set_current_vllm_config

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.weights.layout import torch_dtype
from pipelinerl.weights.load.swap import reload_in_place
from pipelinerl.weights.load.worker import WeightUpdateExtension
from pipelinerl.weights.protocol import Address, Get, ParamSpec
from pipelinerl.weights.transfer.wire import Connection, view_of

PATIENCE_S = 300.0


class OneByOneExtension(WeightUpdateExtension):
    """Pulls and loads tensor after tensor while generation is paused."""

    @torch.no_grad()
    def load_one_by_one(self, port: int, specs: list[Any]) -> None:
        connection = self.__dict__.get("_baseline_connection")
        if connection is None:
            connection = Connection.dial(Address("127.0.0.1", port), os.environ[SECRET_VARIABLE], PATIENCE_S)
            self.__dict__["_baseline_connection"] = connection

        def receive() -> Any:
            for spec in msgspec.convert(specs, list[ParamSpec]):
                tensor = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
                view = tensor.view(-1).view(torch.uint8)
                get = Get(
                    key=spec.name, start=0, end=len(view), bucket_bytes=len(view), transport="tcp", beat_s=PATIENCE_S
                )
                connection.send_message(get)
                connection.receive()
                connection.read_into(view_of(view))
                yield spec.name, tensor

        with set_current_vllm_config(self.vllm_config):
            model = self.model_runner.get_model()
            reload_in_place(model, self.weight_transfer_engine.model_config, receive())
