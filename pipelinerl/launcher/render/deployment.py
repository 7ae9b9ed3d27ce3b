"""The values from which the documents of a platform are rendered."""

import re
from dataclasses import dataclass

from pipelinerl.errors import ConfigError
from pipelinerl.launcher.render.cores import cores_per_node

CPUS = 8
NAME = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The experiment's command line, and the machines that it gets."""

    arguments: tuple[str, ...]
    """Arguments of `pipelinerl.launch`."""
    name: str = "pipelinerl"
    nodes: int = 1
    gpus_per_node: int = 0
    gpu: str = "H100"
    """SkyPilot: name of the accelerator."""
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
        if self.output_dir is None:
            raise ConfigError("output_dir=… is missing: name a folder that every node sees")
        for name in ("nodes", "cpus_per_node", "hours", "nodes_per_server"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be at least 1")
        if self.gpus_per_node < 0 or self.extra_servers < 0:
            raise ConfigError("--gpus-per-node and --extra-servers must not be negative")

    @property
    def cores(self) -> int:
        """Cores of a node."""
        if self.cpus_per_node or not self.gpus_per_node:
            return self.cpus_per_node or CPUS
        return cores_per_node(self.arguments, self.nodes, self.gpus_per_node)

    @property
    def output_dir(self) -> str | None:
        """The run folder that the command line names."""
        values = [argument.partition("=")[2] for argument in self.arguments if argument.startswith("output_dir=")]
        return values[-1] if values else None
