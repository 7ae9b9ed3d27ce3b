"""The launcher's plan: `resolve` completes the configuration, `plan_run` places the roles. Nothing is started."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config import rules
from pipelinerl.config.debug import fixed_settings, started_kinds
from pipelinerl.config.environment import DRY_RUN_VARIABLE, is_on
from pipelinerl.config.load import missing_keys, must_be_given, parse_container, to_container
from pipelinerl.config.nested import with_settings
from pipelinerl.config.origin import absolute, make_importable
from pipelinerl.config.sections import Config
from pipelinerl.config.variables import check_secrets
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.launcher import conversations
from pipelinerl.launcher.commands import CommandOf, RoleCommand
from pipelinerl.world import Job, WorldMap, build_world
from pipelinerl.world.cluster import read_node_environment
from pipelinerl.world.network import look_up


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A complete configuration whose types and rules hold."""

    config: Config
    container: dict[str, Any]
    """The same as plain values, with the settings that `debug.mode` and `sft.epochs` fix."""
    overrides: Sequence[str]
    """Arguments of the command line."""
    command_of: CommandOf
    node_rank: int
    """This launcher's. 0 on Ray, where one launcher starts the roles of all nodes."""
    started: float
    """Unix time of this launcher's start."""
    missing: tuple[str, ...] = ()
    """Keys without a value, which only a dry run may have."""

    @property
    def path(self) -> Path:
        """The run folder."""
        return Path(self.config.output_dir)


@dataclass(frozen=True, kw_only=True)
class RunPlan(Experiment):
    """An experiment with its roles' places and commands."""

    world: WorldMap
    jobs: tuple[Job, ...]
    """The ones that this launcher starts."""
    commands: tuple[RoleCommand, ...]
    """Their commands. On Ray, one for each unit of the world."""
    builds_model: bool = False
    """Whether `model_path` is a tiny model that must be built first."""


def resolve(cfg: DictConfig, overrides: Sequence[str], command_of: CommandOf) -> Experiment:
    """Check names, types and rules of a composed configuration, and fix what its mode fixes.

    Raises:
        ConfigError: the configuration is refused.
        DomainError: the conversations of `sft.epochs` cannot be counted.
    """
    if is_on(os.environ, DRY_RUN_VARIABLE):
        OmegaConf.update(cfg, "dry_run", True)
    missing = tuple(missing_keys(cfg))
    if missing and not cfg.dry_run:
        raise ConfigError(must_be_given(missing))
    for key in missing:  # a dry run shows the world of `base` alone, too
        OmegaConf.update(cfg, key, "not-given")
    path = Path(os.path.expanduser(str(cfg.output_dir))).resolve()
    OmegaConf.update(cfg, "output_dir", str(path))  # before others are made from it
    make_importable(path)
    container = absolute(to_container(cfg), Path.cwd())
    check_secrets(container)
    config = parse_container(container)
    rules.check_rules(config)  # of what the user wrote: a mode's own settings would hide it
    container = with_settings(container, fixed_settings(config))
    if config.sft.epochs is not None:
        try:
            steps = conversations.steps_of(config, overrides)
            container = with_settings(container, {"finetune.max_train_steps": steps})
        except DomainError:
            if not config.dry_run:  # whose check of the conversations says it, and whether that matters here
                raise
    return Experiment(
        config=parse_container(container),
        container=container,
        overrides=overrides,
        command_of=command_of,
        node_rank=0 if config.launcher.engine == "ray" else read_node_environment(os.environ).rank,
        started=psutil.Process().create_time(),
        missing=missing,
    )


def plan_run(run: Experiment, on_ray: WorldMap | None = None) -> RunPlan:
    """Compute the world, and the commands of this launcher's roles.

    Args:
        on_ray: the world of a Ray cluster, where this launcher starts the roles of all nodes.
    """
    world = on_ray or build_world(run.config, os.environ)
    if run.config.dry_run:  # it shows the roles of every node
        look_up(node.hostname for node in world.nodes)
    kinds = started_kinds(run.config)
    placed = world.jobs if on_ray else world.on_node(run.node_rank)
    jobs = tuple(job for job in placed if kinds is None or job.kind in kinds)
    env = {} if on_ray else os.environ  # a launcher beside a Ray cluster has none of its GPUs
    commands = tuple(run.command_of(job, world, run.path, env) for job in jobs)
    return RunPlan(**vars(run), world=world, jobs=jobs, commands=commands)
