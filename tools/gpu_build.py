"""Checks what a GPU would be started with, on a machine without one, in an environment with vLLM's GPU build.

    make test-gpu-build

Every experiment of `conf/` that runs on GPUs is planned for the nodes that it names. The command lines of its servers
are parsed and checked by the GPU build's own parser, and what the dry run predicts is printed. What this package
imports from torch, vLLM and transformers must be there. Ends with 1 if anything is refused or missing.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

from rich.console import Console

from pipelinerl.config.load import compose, parse
from pipelinerl.config.paths import config_names
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import served_path, side_model
from pipelinerl.config.versions import installed_versions, unsupported
from pipelinerl.inference.args import vllm_arguments
from pipelinerl.plan.speed import ASSUMED_GPU, GPUS
from pipelinerl.plan.world_table import render_world
from pipelinerl.world import Cluster, Node, WorldMap, map_world

NEEDED = ("output_dir=/nowhere", "dataset_loader=a.b", "actor.rollout_policy=a.b")
GPUS_PER_NODE = 8
KERNELS = ("vllm._C", "vllm._C_stable_libtorch", "vllm._moe_C", "vllm._moe_C_stable_libtorch")


def gpu_experiments() -> Iterator[tuple[str, Config]]:
    """Every shipped experiment that does not ask for the CPU, by name."""
    for name in config_names():
        cfg = parse(compose(name, list(NEEDED)))
        if cfg.world.accelerator != "cpu":
            yield name, cfg


def planned_world(cfg: Config) -> WorldMap:
    """The world of the experiment on nodes of 8 GPUs, or on as many as it asks for where they are fewer."""
    world = cfg.world
    shares = (world.actor_fraction, world.preprocessor_fraction, world.finetune_fraction)
    wanted = max(shares) if world.share_devices else sum(shares)
    count = -(-wanted // GPUS_PER_NODE)
    names = ["127.0.0.1"] if count == 1 else [f"host-{rank}" for rank in range(count)]
    nodes = [Node(rank=rank, hostname=name, devices=min(wanted, GPUS_PER_NODE)) for rank, name in enumerate(names)]
    identity = None if count == 1 else "planned"
    return map_world(cfg, Cluster(accelerator="cuda", nodes=tuple(nodes), identity=identity), check=False)


def server_lines(cfg: Config, world: WorldMap) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Model and command line of the first server of each kind."""
    for kind in ("actor_llm", "preprocessor_llm"):
        if jobs := world.get(kind):
            model = served_path(cfg, side_model(cfg, kind, 0))
            yield model, vllm_arguments(cfg, world, jobs[0], GPUS[ASSUMED_GPU].memory)


def pretend_to_have_a_gpu() -> None:
    """Let vLLM take this machine for one with CUDA. Without a driver it knows no device, and its parser needs one.

    Its kernels cannot be loaded without a driver: empty modules stand for them.
    """
    sys.modules |= {name: ModuleType(name) for name in KERNELS}
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()


def missing() -> list[str]:
    """What is imported and not there. In a process of its own, before anything is pretended."""
    code = "from pipelinerl.config.versions import *; print(missing_names(('torch', 'vllm', 'transformers')))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, encoding="utf-8")
    return ast.literal_eval(done.stdout.splitlines()[-1])


def main() -> int:
    refused = [f"{line} is missing" for line in missing()]
    pretend_to_have_a_gpu()
    from pipelinerl.inference.server import parse_arguments  # imports vLLM

    console = Console(width=140)
    console.print(installed_versions())
    for name, cfg in gpu_experiments():
        world = planned_world(cfg)
        console.rule(name)
        console.print(render_world(cfg, world))
        for model, line in server_lines(cfg, world):
            try:
                parsed = parse_arguments(line)
            except (SystemExit, ValueError, TypeError) as error:
                refused.append(f"{name}: vLLM's parser refuses {' '.join(line)}: {error}")
                continue
            if parsed.model != model:
                refused.append(f"{name}: vLLM's parser took the model for {parsed.model}")
    console.rule("refused or missing")
    console.print("\n".join([*unsupported(), *refused]) or "nothing")
    return int(bool(refused))


if __name__ == "__main__":
    sys.exit(main())
