"""From an engine to a checkpoint and back. Every rank takes part; rank 0 writes what is shared."""

import logging
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.checkpoints import CheckpointWriter, Counters
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.export import save_hf, save_value_head

log = logging.getLogger(__name__)


def save(
    engine: Engine,
    root: Path,
    counters: Counters,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
) -> dict[str, int]:
    """Publish a checkpoint. Collective.

    Returns:
        The stream positions from which the oldest kept checkpoint would be resumed: nothing below is needed.
    """
    started = time.perf_counter()
    with checkpoints.writing(root, counters.step):
        writer = CheckpointWriter(root, counters.step) if engine.rank == 0 else None
        engine.barrier()
        folder = root / checkpoints.unpublished_name(counters.step)
        state = engine.state()
        if writer is not None:
            writer.write_state(state)
        else:
            for _ in state:
                pass
        checkpoints.save_rng(folder, engine.rank, engine.device)
        save_hf(engine, folder / "hf", dtype, tokenizer)
        save_value_head(engine, folder / "value_head.safetensors")
        positions = _gather_positions(engine, counters)
        needed = None
        if writer is not None:
            path = writer.publish(msgspec.structs.replace(counters, positions=positions))
            kept = checkpoints.prune(root, keep)
            needed = checkpoints.read_counters(kept[-1]).positions
            log.info("checkpoint published path=%s seconds=%.2f", path, time.perf_counter() - started)
    answer: Any = engine.broadcast_object(needed)
    return answer


def resume(engine: Engine, root: Path) -> Counters | None:
    """Load the newest whole checkpoint into the engine; None when there is none. Collective."""
    found = checkpoints.newest_valid(root) if engine.rank == 0 else None
    path: Any = engine.broadcast_object(found.path if found else None)
    if path is None:
        return None
    reader = found or checkpoints.CheckpointReader(path, verify=False)
    counters = reader.counters
    engine.load_state(reader.state, counters.step)
    if (rng := reader.rng(engine.rank)) is not None:
        checkpoints.restore_rng(rng, engine.device)
    log.info("resumed path=%s step=%d samples=%d", path, counters.step, counters.samples_processed)
    return counters


def _gather_positions(engine: Engine, counters: Counters) -> dict[str, int]:
    """Stream positions of all ranks. Collective."""
    if engine.world_size == 1:
        return counters.positions
    gathered: list[Any] = [None] * engine.world_size
    torch.distributed.all_gather_object(gathered, counters.positions)
    return {key: position for positions in gathered for key, position in positions.items()}
