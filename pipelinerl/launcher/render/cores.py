"""How many cores a node with GPUs needs: one for each busy process of the roles that the plan places there."""

import argparse
from functools import lru_cache
from pathlib import Path

from pipelinerl.config.load import compose, parse
from pipelinerl.config.paths import config_names
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.command_line import explain_refusal, take_config_dir, without_needless_plus
from pipelinerl.world import Cluster, Job, Node, map_world


@lru_cache
def cores_per_node(arguments: tuple[str, ...], nodes: int, gpus_per_node: int) -> int:
    """Return the cores of the node that needs most of them. ``arguments``: of `pipelinerl.launch`.

    Raises:
        PipelineRLError: the configuration is invalid, or does not fit on these nodes.
    """
    config = configuration_of(arguments)
    machines = tuple(Node(rank=rank, hostname=f"node-{rank}", devices=gpus_per_node) for rank in range(nodes))
    cluster = Cluster(accelerator="cuda", nodes=machines, identity="rendered")
    world = map_world(config, cluster, check=False)
    return max(sum(cores_of(job, config) for job in world.on_node(rank)) for rank in range(nodes))


def configuration_of(arguments: tuple[str, ...]) -> Config:
    """Return the configuration that this command line of `pipelinerl.launch` means."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    config_dir, rest = take_config_dir(arguments)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-name", "-cn", default="base")
    known, overrides = parser.parse_known_args(rest)
    settings = [without_needless_plus(each) for each in overrides if not each.startswith("-")]
    try:
        return parse(compose(known.config_name, settings, Path(config_dir) if config_dir else None, own=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain_refusal(error, config_names(config_dir))) from error


def cores_of(job: Job, config: Config) -> int:
    """Return the number of processes of a role that compute at the same time."""
    match job.kind:
        case "actor":
            return 1 + config.actor.rollout_workers
        case "verifier":
            return 1 + config.verifier.workers
        case "actor_llm" | "preprocessor_llm":
            return server_cores(len(job.gpus))
        case _:
            return max(len(job.gpus), 1)


def server_cores(gpus: int) -> int:
    """A server's workers, its engine's core, and the process that answers requests."""
    return gpus + 2
