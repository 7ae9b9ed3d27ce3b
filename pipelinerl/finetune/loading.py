"""Loads a model's weights from safetensors files into an engine. Every rank reads only the ranges that it holds.

``model.empty_lm`` builds the model without memory, the engine allocates this rank's share, ``stream_weights`` fills it.
If the files hold a parameter in another form, or DeepSpeed trains adapters, every rank loads the whole model instead.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.adapter import BASE, is_adapter
from pipelinerl.finetune.checkpoint_names import Block, CheckpointNames
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.model import DTYPES, LM_PREFIX, empty_lm, load_lm

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The tensors of a model folder."""

    def __init__(self, files: Mapping[str, Path]):
        """``files``: path of the file that holds each tensor, by the tensor's name."""
        self._files = files
        self._open: tuple[Path, safe_open] | None = None

    @classmethod
    def find(cls, source: str) -> "WeightFiles | None":
        """Find the files of a local folder or of a model on the hub. None without safetensors files."""
        index = _locate(source, INDEX)
        if index is not None:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = {name: _locate(source, name) for name in sorted(set(weight_map.values()))}
            if None in paths.values():
                return None
            return cls({name: path for name, file in weight_map.items() if (path := paths[file])})
        single = _locate(source, SINGLE)
        if single is None:
            return None
        try:
            with safe_open(single, "pt") as file:
                return cls(dict.fromkeys(file.keys(), single))
        except SafetensorError as error:
            raise ConfigError(f"model_path: {single} cannot be read: {error}; get the file again") from error

    def lacking(self, model: PreTrainedModel) -> list[str]:
        """Names of ``model``'s parameters and saved buffers that the files lack with this name and shape."""
        names = CheckpointNames(model)
        loaded = ((checkpoint_name(name), whole) for name, whole in model.named_parameters() if not is_adapter(name))
        wanted = [*loaded, *names.buffers()]
        return [name for name, whole in wanted if not self._have(names.blocks(name, tuple(whole.shape)))]

    def _have(self, blocks: Sequence[Block]) -> bool:
        return all(
            block.name in self._files and block.is_range and tuple(self._slice(block.name).get_shape()) == block.shape
            for block in blocks
        )

    def read_range(self, blocks: Sequence[Block], start: int, count: int) -> Tensor:
        """[count] elements from ``start`` on of the flattened parameter that consists of ``blocks``."""
        parts = []
        for block in sorted(blocks, key=lambda block: block.view.offset):
            first = max(start, block.view.offset)
            end = min(start + count, block.view.offset + block.numel)
            if first < end:
                parts.append(self.read(block.name, first - block.view.offset, end - first))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self, name: str, start: int, count: int) -> Tensor:
        """[count] elements of the flattened tensor ``name`` from ``start`` on. Reads the whole rows that hold them."""
        part = self._slice(name)
        shape = part.get_shape()
        row = max(torch.Size(shape[1:]).numel(), 1)
        first = start // row
        rows = part[first : -(-(start + count) // row)]
        return rows.reshape(-1)[start - first * row :][:count]

    def _slice(self, name: str):
        path = self._files[name]
        try:
            if self._open is None or self._open[0] != path:
                self._open = (path, safe_open(path, "pt"))
            return self._open[1].get_slice(name)
        except SafetensorError as error:
            raise ConfigError(f"model_path: {path} cannot be read at {name}: {error}; get the file again") from error


def checkpoint_name(name: str) -> str:
    """Name of a parameter as in the model without adapters."""
    return name.replace(BASE, ".")


def load_model(cfg: Config, attention: str, *, whole: bool = False) -> tuple[nn.Module, WeightFiles | None]:
    """The language model, either empty with the files that fill it, or loaded with None.

    Args:
        attention: name of the implementation in transformers.
        whole: load it in `finetune.dtype`, also where it could be streamed.
    """
    if whole:
        return load_lm(cfg.model_path, cfg, attention, DTYPES[cfg.finetune.dtype]), None
    files = WeightFiles.find(cfg.model_path)
    if files is not None:
        lm = empty_lm(cfg.model_path, cfg, attention)
        lacking = files.lacking(lm)
        if not lacking and getattr(lm.config, "quantization_config", None) is None:
            return lm, files
        log.info("event=whole_model_loaded reason=not in its files as they are: %s", lacking[:3])
    return load_lm(cfg.model_path, cfg, attention), None


def stream_weights(engine: Engine, files: WeightFiles) -> None:
    """Fill the engine's pieces of the language model from ``files``, and other pieces with 0. Collective."""
    names, shapes = engine.policy.names, dict(engine.full_shapes())
    for name, piece in engine.weights().items():
        if not name.startswith(LM_PREFIX):
            piece.tensor.zero_()
        elif not is_adapter(name):
            blocks = names.blocks(checkpoint_name(name.removeprefix(LM_PREFIX)), shapes[name])
            piece.tensor.copy_(files.read_range(blocks, piece.start, len(piece.tensor)))
    for name, buffer in names.buffers():
        values = files.read_range(names.blocks(name, tuple(buffer.shape)), 0, buffer.numel())
        buffer.copy_(values.view(buffer.shape))
    engine.loaded(0)


def _locate(source: str, name: str) -> Path | None:
    """Path of the model's file ``name`` in its folder or in the hub's cache, after a download if needed."""
    from transformers.utils import cached_file

    found = cached_file(
        source,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return None if found is None else Path(found)
