"""The values from which the documents of a platform are rendered.

A node with GPUs needs one core for each busy process of the roles that the plan places there.
"""

import argparse
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipelinerl.config.load import parse_container
from pipelinerl.config.resume import OF_ONE_LAUNCH, asked_once
from pipelinerl.config.sections import Config
from pipelinerl.config.variables import check_literals, variables_of
from pipelinerl.errors import ConfigError, PipelineRLError
from pipelinerl.launcher.command_line import composed_container, explain_refusal, take_config_dir
from pipelinerl.world import Cluster, Job, Node, map_world

CPUS = 8
"""Cores of a node without GPUs, which its slots share."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The experiment's command line, and the machines that it gets."""

    arguments: tuple[str, ...]
    """Arguments of `pipelinerl.launch`."""
    name: str = "pipelinerl"
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int | None = None
    """None = what the plan's roles need on a node with GPUs, and `CPUS` without."""
    hours: int = 24
    python: str = "python"
    """Interpreter on the machines."""
    workdir: str = "."
    """Folder on the machines in which roles start."""
    image: str = ""
    """Kubernetes: the container's image."""
    extra_servers: int = 0
    """Kubernetes: additional servers, which join and leave the run as the platform has room."""
    nodes_per_server: int = 1
    """Kubernetes: pods of each additional server. Its devices are divided evenly among them."""

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(f"--name {self.name!r}: use at most 52 of a-z, 0-9 and -, beginning with a letter")
        for argument in self.arguments:
            check_literals(meant_by(argument))
        if self.output_dir is None:
            raise ConfigError("output_dir=… is missing: name a folder that every node sees")
        config = self.config if self.needs_plan else self.config_as_far_as_it_is_here()
        if once := asked_once(config):
            raise ConfigError(
                f"{' and '.join(once)} is for one launch, but the platform launches again whenever it starts the job "
                "again, which would delete the run or set its streams aside each time: leave it out of the command "
                "line and the configuration file, and do it once before"
            )
        for name in ("nodes", "cpus_per_node", "hours", "nodes_per_server"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.gpus_per_node < 0 or self.extra_servers < 0:
            raise ConfigError("--gpus-per-node and --extra-servers must not be negative")

    @cached_property
    def container(self) -> dict[str, Any]:
        """The configuration of the command line, as plain values."""
        return configuration_of(self.arguments)

    @cached_property
    def config(self) -> Config:
        return parse_container(self.container)

    @property
    def variables(self) -> list[str]:
        """Names of the environment variables to which the configuration refers, as far as it can be read here."""
        try:
            return variables_of(self.container)
        except PipelineRLError:
            return sorted({name for argument in self.arguments for name in variables_of(meant_by(argument))})

    def config_as_far_as_it_is_here(self) -> Config:
        """The configuration, or only the command line's settings for one launch if its file cannot be read here."""
        try:
            return self.config
        except PipelineRLError:
            said = [each for each in self.arguments if each.lstrip("+").partition("=")[0] in OF_ONE_LAUNCH]
            return parse_container(configuration_of(("output_dir=x", *said)))

    @property
    def needs_plan(self) -> bool:
        """Whether the cores of a node follow from the roles that the plan places there."""
        return self.gpus_per_node > 0 and not self.cpus_per_node

    @cached_property
    def cores(self) -> int:
        """Cores of a node."""
        if self.needs_plan:
            return cores_per_node(self.config, self.nodes, self.gpus_per_node)
        return self.cpus_per_node or CPUS

    @cached_property
    def output_dir(self) -> str | None:
        """The command line's `output_dir`. Raises ``ConfigError`` if it is no text."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        said = [argument for argument in self.arguments if argument.lstrip("+").startswith("output_dir=")]
        if not said:
            return None
        try:
            (override,) = OverridesParser.create().parse_overrides(said[-1:])
            folder = override.value()
        except HydraException as error:
            raise ConfigError(explain_refusal(error)) from error
        if not isinstance(folder, str):
            raise ConfigError(f"{said[-1]}: that is no folder")
        return folder

    @property
    def run_folder(self) -> str:
        """The run folder, for a document with its path. Raises ``ConfigError`` if the path differs between machines."""
        folder = self.output_dir or ""
        if folder.startswith("~") or "${" in folder:
            raise ConfigError(f"output_dir={folder}: the document has this path, the same for all nodes: write it out")
        return folder


def cores_per_node(config: Config, nodes: int, gpus_per_node: int) -> int:
    """Return the cores of the node that needs most of them.

    Raises:
        PipelineRLError: the run does not fit on these nodes.
    """
    machines = tuple(Node(rank=rank, hostname=f"node-{rank}", devices=gpus_per_node) for rank in range(nodes))
    cluster = Cluster(accelerator="cuda", nodes=machines, identity="rendered")
    world = map_world(config, cluster, check=False)
    return max(sum(cores_of(job, config) for job in world.on_node(rank)) for rank in range(nodes))


def meant_by(argument: str) -> dict[str, Any]:
    """Returns an override's value under its key, as nested mappings. Empty for other arguments."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        (override,) = OverridesParser.create().parse_overrides([argument])
    except HydraException:
        return {}
    value: Any = override.value()
    for part in reversed(override.key_or_group.split(".")):
        value = {part: value}
    return value


def configuration_of(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of this command line of `pipelinerl.launch`. Raises ``ConfigError`` if it is invalid."""
    config_dir, rest = take_config_dir(arguments)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-name", "-cn", default="base")
    known, overrides = parser.parse_known_args(rest)
    settings = [each for each in overrides if not each.startswith("-")]
    folder = Path(config_dir) if config_dir else None
    return composed_container(known.config_name, settings, folder, may_miss=False)


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
