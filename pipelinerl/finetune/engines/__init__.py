"""Distributed engines with one interface. ``build_engine`` makes the configured one."""

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from pipelinerl.config.engine import engine_class, traits_of
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.engines.base import Engine, NonFiniteGradientError
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rendezvous import leave_ranks, open_rendezvous

__all__ = ["Engine", "NonFiniteGradientError", "build_engine", "join_ranks", "read_ranks"]


_stores: list[dist.Store] = []
"""The store of this process's group: see `SealedStore`."""


def read_ranks(accelerator: str) -> tuple[int, int, torch.device]:
    """(rank, world size, device) from the environment of `finetune.ranks`. Makes the device current.

    Args:
        accelerator: `cuda` or `cpu`.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return rank, world_size, device


def join_ranks(name: str, world_size: int, device: torch.device, timeout_s: float) -> None:
    """Join the process group that engine ``name`` needs, and leave it when Python ends. A single rank may need none.

    Args:
        timeout_s: how long a rank waits for the others in one collective. NCCL's default of 10 minutes may be too short
            where rank 0 alone waits for the servers or writes checkpoints.
    """
    if (world_size > 1 or traits_of(name).always_in_a_group) and not dist.is_initialized():
        rank = int(os.environ.get("RANK", "0"))
        _stores.append(open_rendezvous(rank, world_size, timeout_s))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_stores[-1],
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        # A watchdog of NCCL that calls the store after Python's end would end the process by SIGABRT.
        atexit.register(leave_ranks)


def build_engine(name: str, policy: Policy, cfg: Config, device: torch.device) -> Engine:
    """Make the engine with this short or dotted name for ``policy``.

    Raises:
        ConfigError: ``name`` is no engine, or one that takes itself for another rank than this process is.
    """
    engine: Engine = engine_class(name)(policy, cfg, device)
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = (getattr(engine, "rank", None), getattr(engine, "world_size", None))
    if own != ranks:  # it would not sum the gradients of all ranks
        raise ConfigError(
            f"`finetune.engine` is {name}, which says that it is rank {own[0]} of {own[1]}, but this process is rank "
            f"{ranks[0]} of {ranks[1]}: let it take both from torch.distributed and sum gradients over ranks, or say "
            "in its traits on how many ranks it trains (max_ranks)"
        )
    return engine
