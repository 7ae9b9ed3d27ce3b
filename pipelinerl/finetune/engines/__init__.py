"""Distributed engines behind one interface; ``build_engine`` chooses."""

import os

import torch
import torch.distributed as dist

from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.engines.base import Engine, NonFiniteGradientError
from pipelinerl.finetune.model import Policy

__all__ = ["Engine", "NonFiniteGradientError", "build_engine", "choose_engine", "init_ranks"]


def choose_engine(cfg: Config, world_size: int) -> str:
    """`finetune.engine`, or what `use_fsdp` and `use_deepspeed` mean; one rank needs neither."""
    if cfg.finetune.engine != "auto":
        return cfg.finetune.engine
    if world_size == 1:
        return "ddp"
    if cfg.use_fsdp:
        return "fsdp2"
    return "deepspeed" if cfg.use_deepspeed else "ddp"


def init_ranks(accelerator: str) -> tuple[int, int, torch.device]:
    """(rank, world size, device) from the environment of torchrun; joins the process group when there are several."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if accelerator == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world_size, device


def build_engine(name: str, policy: Policy, cfg: Config, device: torch.device) -> Engine:
    """The engine ``name`` around ``policy``."""
    if name == "ddp":
        from pipelinerl.finetune.engines.replicated import ReplicatedEngine

        return ReplicatedEngine(policy, cfg.finetune, device)
    raise ConfigError(f"finetune.engine is {name!r}: use ddp, deepspeed or fsdp2")
