"""The launcher's program, in order: validate, claim the folder, place, check, write, start, watch, stop, report.

It starts nothing before all checks have passed. It returns an exit code: 0 done, 1 failed, 2 refused, 130 and 143
interrupted.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config import rules
from pipelinerl.config.debug import fixed_settings, started_kinds, with_settings
from pipelinerl.config.environment import (
    DRY_RUN_VARIABLE,
    REDIS_PASSWORD_VARIABLE,
    SECRET_VARIABLE,
    checked_variables,
    drop_services,
    is_on,
)
from pipelinerl.config.load import missing_keys, must_be_given, parse_container, to_container
from pipelinerl.config.origin import absolute, make_importable
from pipelinerl.config.resume import asked_once
from pipelinerl.config.sections import Config
from pipelinerl.config.variables import check_secrets, variables_of
from pipelinerl.errors import ConfigError, DomainError, PipelineRLError
from pipelinerl.inspect.debug_run import debug_run_lines, read_debug_run
from pipelinerl.inspect.report import read_summary, summary_lines
from pipelinerl.launcher import checks, conversations, preflight, recorded, run_dir, stream_epoch
from pipelinerl.launcher.commands import CommandOf, role_command
from pipelinerl.launcher.coordination import Coordination
from pipelinerl.launcher.external import ROLES_FILE, write_roles_file
from pipelinerl.launcher.losses import exit_code_of
from pipelinerl.launcher.peers import plan_peers
from pipelinerl.launcher.processes import Host
from pipelinerl.launcher.reporting import RunReports
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.running import RunPlan, adopt_secrets, say, show_world, supervise, voice
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.membership.address import address_of, open_store
from pipelinerl.membership.lease import LauncherNote
from pipelinerl.observability.logging import logging_restored, setup_launcher_logging
from pipelinerl.world import WorldMap, build_world, map_world
from pipelinerl.world.cluster import read_node_environment
from pipelinerl.world.home import temporary_folder, writable_folders
from pipelinerl.world.network import look_up
from pipelinerl.world.process import process_restored
from pipelinerl.world.proxies import bypass

log = logging.getLogger(__name__)

EXIT_DONE = 0
HAVE_STREAMS = ("actor", "preprocessor", "finetune")
"""Kinds that keep in their run folder how far they are in the streams."""


def launch(cfg: DictConfig, overrides: Sequence[str], *, command_of: CommandOf = role_command) -> int:
    """Run the experiment of a composed configuration and return the exit code. Raises PipelineRLError to refuse it.

    What it changes in its own process (umask, environment, signal handlers, logging) is as before when it returns.
    """
    with process_restored(), logging_restored():
        os.umask(0o077)
        bypass(os.environ)
        if dropped := drop_services(os.environ):
            say(f"dropped, as Kubernetes sets them beside a Service whose name is a program's: {', '.join(dropped)}")
        os.environ.update(checked_variables(os.environ))
        temporary_folder()
        folders = writable_folders(os.environ)
        if "XDG_CACHE_HOME" in folders:
            moved = ", ".join(f"{name}={folders[name]}" for name in ("HOME", "XDG_CACHE_HOME"))
            say(f"user {os.getuid()} cannot write its home or a cache in it: this run uses {moved}")
        os.environ.update(folders)
        return run_experiment(cfg, overrides, command_of)


def run_experiment(cfg: DictConfig, overrides: Sequence[str], command_of: CommandOf) -> int:
    started = psutil.Process().create_time()
    if is_on(os.environ, DRY_RUN_VARIABLE):
        OmegaConf.update(cfg, "dry_run", True)
    missing = missing_keys(cfg) if cfg.dry_run else []
    for key in missing:  # a dry run shows the world of `base` alone, too
        OmegaConf.update(cfg, key, "not-given")
    container, config = resolved(cfg, overrides)
    path = Path(config.output_dir)
    if config.dry_run:
        return dry_run(make_plan(config, container, path, command_of), path, overrides, command_of, missing)
    rank = read_node_environment(os.environ).rank
    if rank and config.launcher.engine == "local":
        return follow(make_plan(config, container, path, command_of), path, overrides, started)
    claim = run_dir.claim(path, container, force_restart=config.force_restart)
    with run_dir.holding(claim):
        setup_launcher_logging(path / run_dir.LOG_FILE)
        if claim.finished:
            write_roles_file(path, ())
            return tell_finished(claim, config)
        preflight.discard_broken_model(config, say)
        if config.launcher.engine == "ray":
            return tell_ending(launch_on_ray(claim, config, container, overrides, command_of, started), path, config)
        plan = make_plan(config, container, path, command_of)
        plan = prepare(plan, path, overrides)
        has_old_streams = take_streams(claim, plan)
        recorded.copy_streams(config, path, say)
        run_dir.write_run_dir(path, container, plan.world, plan.commands)
        if config.launcher.engine == "external":
            return hand_over(plan, path, command_of)
        if len(plan.world.nodes) == 1:
            ending = asyncio.run(supervise(plan, path, claim.resumed, started, lock=claim.lock))
        else:
            ending = asyncio.run(lead(plan, claim, started, has_old_streams))
        if config.debug.mode and ending.kind == "stopped":
            RunReports(config, path, say).debug_run(finished=False)
    return tell_ending(ending, path, config)


def resolved(cfg: DictConfig, overrides: Sequence[str]) -> tuple[dict[str, Any], Config]:
    """Return the checked configuration of this run, with the settings that `debug.mode` and `sft.epochs` fix."""
    missing = missing_keys(cfg)
    if missing:
        raise ConfigError(must_be_given(missing))
    path = Path(os.path.expanduser(str(cfg.output_dir))).resolve()
    OmegaConf.update(cfg, "output_dir", str(path))  # before others are made from it
    make_importable(path)
    container = absolute(to_container(cfg), Path.cwd())
    check_secrets(container)
    config = parse_container(container)
    rules.check_rules(config)
    container = with_settings(container, fixed_settings(config))
    if config.sft.epochs is not None:
        try:
            steps = conversations.steps_of(config, overrides)
            container = with_settings(container, {"finetune.max_train_steps": steps})
        except DomainError:
            if not config.dry_run:  # whose check of the conversations says it, and whether that matters here
                raise
    return container, parse_container(container)


def hand_over(plan: RunPlan, path: Path, command_of: CommandOf) -> int:
    """Write the files from which a platform starts every role, and build the tiny model if there is one."""
    if plan.builds_model:
        say(f"building the tiny model {plan.config.model_path}")
        problem = asyncio.run(preflight.build_tiny_model(plan.config, os.environ))
        if problem:
            raise ConfigError(problem)
    run_dir.write_roles(path, [command_of(job, plan.world, path, os.environ) for job in plan.world.jobs])
    write_roles_file(path, plan.world.jobs)
    say(f"{path} is ready: {len(plan.world.jobs)} roles are to be started, see {path / ROLES_FILE}")
    return EXIT_DONE


def launch_on_ray(
    claim: Claim,
    config: Config,
    container: dict[str, Any],
    overrides: Sequence[str],
    command_of: CommandOf,
    started: float,
) -> Ending:
    """Plan the world of a Ray cluster, have Ray place its roles, and keep them running until the end."""
    from pipelinerl.launcher import ray_cluster
    from pipelinerl.launcher.ray_engine import RayEngine

    path = claim.path
    with ray_cluster.connected(config.launcher.ray_address):
        cluster = ray_cluster.cluster_of(ray_cluster.alive_nodes(), config.world, identity=str(path))
        plan = make_plan(config, container, path, command_of, map_world(config, cluster, check=False))
        plan = prepare(plan, path, overrides)
        take_streams(claim, plan)
        engine = RayEngine(plan.world, path, config.launcher, command_of, say)
        world = engine.place_all()
        names = [unit.name for unit in ray_cluster.units_of(world)]
        units = tuple(command for command in plan.commands if command.name in names)
        run_dir.write_run_dir(path, container, world, plan.commands)

        def engine_on(host: Host) -> RayEngine:
            names = (SECRET_VARIABLE, REDIS_PASSWORD_VARIABLE, *variables_of(container))
            engine.set_secrets({name: host.environment[name] for name in names if name in host.environment})
            return engine

        plan = replace(plan, world=world, commands=units)
        return asyncio.run(supervise(plan, path, claim.resumed, started, lock=claim.lock, engine_on=engine_on))


async def lead(plan: RunPlan, claim: Claim, started: float, has_old_streams: bool) -> Ending:
    """Run node 0 of several. Its roles start at once, and the other launchers follow."""
    connection = coordination_of(plan, claim.path)
    await connection.find_no_rival()
    marker = run_dir.mark_folder(claim.path)
    try:
        connection.take_part(marker=marker.name, resumed=claim.resumed, old_streams=has_old_streams)
        return await supervise(plan, claim.path, claim.resumed, started, connection, claim.lock)
    except (PipelineRLError, OSError) as error:
        await connection.tell_failure(error)
        raise
    finally:
        connection.close()
        marker.unlink(missing_ok=True)


def follow(plan: RunPlan, path: Path, overrides: Sequence[str], started: float) -> int:
    """Run any other node. If the run folder is shared, the leader owns it. Otherwise this node claims its own."""

    async def run() -> Ending:
        connection = coordination_of(plan, path)
        try:
            start = await connection.meet()
            if start.ending == "done":
                say(f"{path}: the run is finished")
                return Ending(kind="done")
            return await run_part(plan, path, start, started, connection)
        except (PipelineRLError, OSError) as error:
            await connection.tell_failure(error)
            raise
        finally:
            connection.close()

    if run_dir.holds_finished(path, plan.container, force_restart=plan.config.force_restart):
        say(f"{path}: the run is finished")
        return EXIT_DONE
    plan = prepare(plan, path, overrides)
    return tell_ending(asyncio.run(run()), path, plan.config)


async def run_part(plan: RunPlan, path: Path, start: LauncherNote, started: float, connection: Coordination) -> Ending:
    """Run the roles of a node that follows. ``start``: the leader's note."""
    if plan.config.streams.backend == "files" or (path / start.marker).exists():  # leases in the folder: it is shared
        run_dir.write_roles(path, plan.commands)
        setup_launcher_logging(path / f"launcher.{plan.node_rank}.log")
        return await supervise(plan, path, start.resumed, started, connection)
    claim = run_dir.claim(path, plan.container, force_restart=plan.config.force_restart)
    with run_dir.holding(claim):
        setup_launcher_logging(path / run_dir.LOG_FILE)
        if start.old_streams and not claim.resumed and has_streams(plan):
            raise ConfigError(old_streams_of(path, plan.config))
        if has_streams(plan):  # any other node may come later
            follow_epoch(claim, plan.config, is_leader_resumed=start.resumed)
        run_dir.write_run_dir(path, plan.container, plan.world, plan.commands)
        return await supervise(plan, path, start.resumed, started, connection, claim.lock)


def take_streams(claim: Claim, plan: RunPlan) -> bool:
    """Set the run's streams aside if asked to. Returns whether an external redis has records of an earlier launch.

    Raises:
        ConfigError: an external redis may delete records, or has streams of an earlier run in the folder of a new one.
            Or the streams are packed for other trainer ranks.
    """
    config = plan.config
    knows_password = config.launcher.engine != "external" or REDIS_PASSWORD_VARIABLE in os.environ
    is_external = config.streams.external and knows_password
    if is_external:
        if config.launcher.engine != "external":
            adopt_secrets(plan)
        stream_epoch.check_external(claim.path, config)
        if config.force_restart:
            stream_epoch.delete_external(claim.path, config)
    if claim.resumed and config.resume == "checkpoint":
        stream_epoch.begin_epoch(claim.path, config, say)
    elif claim.resumed:
        stream_epoch.check_packing(claim.path, config, plan.world)
    if not (is_external and stream_epoch.has_records(claim.path, config)):
        return False
    if not claim.resumed and has_streams(plan):
        raise ConfigError(old_streams_of(claim.path, config))
    return True


def has_streams(plan: RunPlan) -> bool:
    return any(job.kind in HAVE_STREAMS for job in plan.world.on_node(plan.node_rank))


def old_streams_of(path: Path, config: Config) -> str:
    return (
        f"`output_dir` is {str(path)!r}: on this node it is new, but redis at {config.streams.host}:"
        f"{config.streams.port} has the streams of an earlier run in it; bring that run's folder back to resume it, "
        "choose another folder, or use force_restart=true to delete the streams"
    )


def follow_epoch(claim: Claim, config: Config, *, is_leader_resumed: bool) -> None:
    """Begin a new epoch in the folder of a node that follows, if the leader has begun one.

    The folder may be new, because the node replaces a lost one.

    Raises:
        ConfigError: this folder has a run and the leader's has none, so the streams were not set aside.
    """
    if config.resume != "checkpoint":
        return
    if claim.resumed and not is_leader_resumed:
        raise ConfigError(
            "`resume` is checkpoint, but the run folder of node 0 is new, so nobody has deleted the old streams: "
            "start node 0 with its old folder"
        )
    if is_leader_resumed:
        stream_epoch.begin_epoch(claim.path, config, say, owns_external=False)


def coordination_of(plan: RunPlan, path: Path) -> Coordination:
    """Return this launcher's part among the launchers of all nodes, and adopt the run's secrets, which it needs."""
    address = address_of(plan.config, path, plan.world)
    rank, limits = plan.node_rank, plan.config.launcher
    on_redis = plan.config.streams.backend == "redis"
    peers = plan_peers(plan.world, rank, plan.container, os.environ, limits, str(address), on_redis=on_redis)
    adopt_secrets(plan)
    return Coordination(peers, open_store(address), say)


def tell_finished(claim: Claim, config: Config) -> int:
    say(f"the run in {claim.path} is finished:")
    figures = read_debug_run(claim.path)
    summary = read_summary(claim.path) or {}
    lines = debug_run_lines(figures, claim.path) if figures else summary_lines(summary, claim.path)
    for line in lines:
        say("  " + line)
    if figures:
        say("force_restart=true starts over")
        return EXIT_DONE
    length = "finetune.max_train_steps" if config.sft.epochs is None else "sft.epochs"
    say(f"raise {length} to go on, or force_restart=true to start over")
    return EXIT_DONE


def prepare(plan: RunPlan, path: Path, overrides: Sequence[str]) -> RunPlan:
    """Run every check, tell the warnings, and return the plan with `builds_model` set."""
    started, checking = time.monotonic(), ["the plan"]
    with voice.live(lambda: f"checking {checking[-1]}, {time.monotonic() - started:.0f} s"):
        warnings = checks.run_checks(start_of(plan, path, overrides), begin=checking.append)
    for warning in warnings:
        say(f"warning: {warning}")
    return replace(plan, builds_model=preflight.needs_tiny_model(plan.config, overrides))


def start_of(plan: RunPlan, path: Path, overrides: Sequence[str]) -> checks.Start:
    return checks.Start(
        config=plan.config,
        container=plan.container,
        world=plan.world,
        node_rank=plan.node_rank,
        path=path,
        overrides=overrides,
    )


def make_plan(
    config: Config, container: dict[str, Any], path: Path, command_of: CommandOf, world: WorldMap | None = None
) -> RunPlan:
    """Compute the world and this node's commands. Starts and writes nothing.

    Args:
        world: of a Ray cluster, whose roles this launcher starts on all nodes.
    """
    node_rank = 0 if world else read_node_environment(os.environ).rank
    jobs = world.jobs if world else None
    world = world or build_world(config, os.environ)
    if config.dry_run:  # it shows the roles of every node
        look_up(node.hostname for node in world.nodes)
    env = {} if jobs else os.environ  # a launcher beside a Ray cluster has none of its GPUs
    kinds = started_kinds(config)
    commands = tuple(
        command_of(job, world, path, env)
        for job in jobs or world.on_node(node_rank)
        if kinds is None or job.kind in kinds
    )
    return RunPlan(config=config, container=container, world=world, node_rank=node_rank, commands=commands)


def dry_run(plan: RunPlan, path: Path, overrides: Sequence[str], command_of: CommandOf, missing: Sequence[str]) -> int:
    """Print the world, all commands and the warnings of every check. Starts and writes nothing."""
    from pipelinerl.launcher.commands import printable

    if not missing:
        run_dir.check_folder(path, plan.container, force_restart=plan.config.force_restart)
    warnings = checks.run_checks(start_of(plan, path, overrides), only_shown=True)
    show_world(plan)
    kinds = started_kinds(plan.config)
    for job in (job for job in plan.world.jobs if kinds is None or job.kind in kinds):
        say("")
        say(f"# {job.name} on {job.hostname}")
        say(printable(command_of(job, plan.world, path, os.environ)))
    say("dry run: nothing was started or written")
    for warning in (*warnings, *([must_be_given(missing)] if missing else [])):
        say(f"warning: {warning}")
    return EXIT_DONE


def tell_ending(ending: Ending, path: Path, config: Config) -> int:
    """Say how the run ended and return the exit code. Standalone servers end only when they are stopped."""
    if ending.restarts:
        say("restarts: " + ", ".join(f"{name} {count}" for name, count in ending.restarts.items()))
    if ending.kind == "done" or (config.debug.mode == "servers" and ending.kind == "stopped"):
        return EXIT_DONE
    if ending.kind == "stopped":
        once = " and ".join(asked_once(config))
        say(f"stopped by {ending.reason}; the same command{f' without {once}' if once else ''} resumes {path}")
    else:
        say("")
        say(f"the run failed{': ' + ending.reason if ending.reason else ''}")
        if ending.failure:
            say(str(ending.failure))
    return exit_code_of(ending.kind, ending.reason)
