"""Whole training states of a checkpoint, for comparisons."""

from pathlib import Path

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader

from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.pieces import Piece


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name, flattened; generators and proximal policies are left out."""
    sizes = {
        name: entry.size
        for name, entry in HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata.items()
    }
    state = {
        name: torch.full(size, torch.nan) for name, size in sizes.items() if not name.startswith(("rng.", "proximal."))
    }
    checkpoints.read(path, {name: Piece(tensor, 0, len(tensor)) for name, tensor in state.items()})
    return state
