"""The table of published models and the trainer and server configurations that hold them."""

import argparse
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len
from pipelinerl.plan.memory import server_items, trainer_bytes, utilization
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape
from pipelinerl.plan.training_memory import GIB

REQUIRED = ("output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b")
TRAINERS = (
    ("ddp", 1),
    ("deepspeed", 8),
    ("fsdp2", 8),
    ("fsdp2, ep 8", 8),
    ("deepspeed", 32),
    ("fsdp2", 32),
    ("fsdp2, ep 8", 64),
    ("deepspeed", 128),
)
"""(trainer, ranks). DeepSpeed: as `deepspeed_config` says, which is ZeRO-3 by default."""
EXPERTS = {"fsdp2, ep 8": ["finetune.shard_gradients=true", "finetune.expert_ranks=8"]}
"""Overrides of the trainers whose ranks divide experts and shard gradients."""
SERVER_SIZES = (1, 2, 4, 8, 16)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu-gib", type=float, default=80, help="memory of one GPU")
    parser.add_argument("overrides", nargs="*", help="overrides of conf/base.yaml, e.g. finetune.seq_length=32768")


def run_memory(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print the GiB that one GPU needs, for every model and trainer, and the smallest server of every model."""
    gpu_bytes = args.gpu_gib * GIB
    title = f"GiB per trainer GPU of {args.gpu_gib:g} GiB (bold: fits), and GPUs per server"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", no_wrap=True)
    for trainer, ranks in TRAINERS:
        table.add_column(f"{trainer}\n× {ranks}", justify="right", no_wrap=True)
    table.add_column("server", justify="right")
    rows = []
    trainers = {name: _trainer(name, args.overrides) for name, _ in TRAINERS}
    for name, shape in PUBLISHED_SHAPES.items():
        needed = {f"{key} × {n}": trainer_bytes(trainers[key], shape, n) / GIB for key, n in TRAINERS}
        server = smallest_server(trainers["ddp"], shape, gpu_bytes)
        cells = [f"[bold]{x:.0f}[/]" if x * GIB <= gpu_bytes else f"{x:.0f}" for x in needed.values()]
        table.add_row(name.partition("/")[2], *cells, "none" if server is None else str(server))
        rows.append({"model": name, "gib": {key: round(x, 1) for key, x in needed.items()}, "gpus_per_server": server})
    console.print(table)
    return {"gpu_gib": args.gpu_gib, "overrides": args.overrides, "models": rows}


def smallest_server(cfg: Config, shape: ModelShape, gpu_bytes: float) -> int | None:
    """Fewest GPUs that hold the model and one sequence of `max_model_len` tokens. None: none of `SERVER_SIZES`."""
    length = max_model_len(cfg) or cfg.finetune.seq_length
    for ranks in SERVER_SIZES:
        held = sum(item.num_bytes for item in server_items(cfg, shape, "actor_llm", ranks))
        if held + length * shape.kv_bytes_per_token() // ranks <= gpu_bytes * utilization(cfg):
            return ranks
    return None


def _trainer(name: str, overrides: list[str]) -> Config:
    engine = name.partition(",")[0]
    return parse(compose("base", [*REQUIRED, f"finetune.engine={engine}", *EXPERTS.get(name, ()), *overrides]))
