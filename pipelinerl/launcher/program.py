"""The launcher's program, in order: resolve, claim the folder, plan, check, write, start, watch, stop, report.

It starts nothing before all checks have passed, and a refusal leaves no file. Exit codes: 0 done, 1 failed, 2 refused,
130 and 143 interrupted.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from omegaconf import DictConfig

from pipelinerl.config.debug import started_kinds
from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE, SECRET_VARIABLE
from pipelinerl.config.load import must_be_given
from pipelinerl.config.resume import asked_once
from pipelinerl.config.sections import Config
from pipelinerl.config.variables import variables_of
from pipelinerl.inspect.debug_run import debug_run_lines, read_debug_run
from pipelinerl.inspect.report import read_summary, summary_lines
from pipelinerl.launcher import run_dir, several_nodes, streams_at_start
from pipelinerl.launcher.checks import MemoryPlanError, checked, run_checks
from pipelinerl.launcher.commands import CommandOf, printable, role_command
from pipelinerl.launcher.losses import exit_code_of
from pipelinerl.launcher.model_build import discard_broken_model
from pipelinerl.launcher.processes import Host
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.run_plan import Experiment, plan_run, resolve
from pipelinerl.launcher.running import say, show_world, supervise
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.observability.logging import logging_restored, setup_launcher_logging
from pipelinerl.world import map_world
from pipelinerl.world.environment import complete
from pipelinerl.world.process import process_restored


def launch(cfg: DictConfig, overrides: Sequence[str], *, command_of: CommandOf = role_command) -> int:
    """Run the experiment of a composed configuration and return the exit code.

    Umask, environment, signal handlers and logging of this process are restored at the end.

    Raises:
        PipelineRLError: the experiment is refused.
    """
    with process_restored(), logging_restored():
        os.umask(0o077)
        for note in complete(os.environ):
            say(note)
        run = resolve(cfg, overrides, command_of)
        if run.config.dry_run:
            return dry_run(run)
        if run.config.launcher.engine == "local" and run.node_rank:
            return follow(run)
        claim = run_dir.claim(run.path, run.container, force_restart=run.config.force_restart)
        with run_dir.holding(claim):
            setup_launcher_logging(run.path / run_dir.LOG_FILE, run.config.launcher.max_log_mb)
            if claim.finished:
                return report_finished(run)
            discard_broken_model(run.config, say)
            return START[run.config.launcher.engine](run, claim)


def dry_run(run: Experiment) -> int:
    """Print the world, all commands and the warnings of every check. Starts and writes nothing."""
    plan = plan_run(run)
    if not run.missing:
        run_dir.check_folder(run.path, run.container, force_restart=run.config.force_restart)
    try:
        warnings = run_checks(plan, only_shown=True)
    except MemoryPlanError:
        show_world(plan)  # the table says what takes the memory
        raise
    show_world(plan)
    kinds = started_kinds(run.config)
    for job in (job for job in plan.world.jobs if kinds is None or job.kind in kinds):
        say("")
        say(f"# {job.name} on {job.hostname}")
        say(printable(run.command_of(job, plan.world, run.path, os.environ)))
    say("dry run: nothing was started or written")
    for warning in (*warnings, *([must_be_given(run.missing)] if run.missing else [])):
        say(f"warning: {warning}")
    return 0


def start_local(run: Experiment, claim: Claim) -> int:
    """Run this node's roles, and with several nodes lead the launchers of the others."""
    plan = checked(plan_run(run))
    old_streams = streams_at_start.take(claim, plan)
    run_dir.write_run_dir(plan)
    if len(plan.world.nodes) > 1:
        return report_exit(asyncio.run(several_nodes.lead(plan, claim, old_streams=old_streams)), plan.config)
    return report_exit(asyncio.run(supervise(plan, resumed=claim.resumed, lock=claim.lock)), plan.config)


def start_ray(run: Experiment, claim: Claim) -> int:
    """Plan the world of a Ray cluster, have Ray place its roles, and keep them running until the end."""
    from pipelinerl.launcher import ray_cluster
    from pipelinerl.launcher.ray_engine import RayEngine

    with ray_cluster.connected(run.config.launcher.ray_address):
        cluster = ray_cluster.cluster_of(ray_cluster.alive_nodes(), run.config.world, identity=str(run.path))
        plan = checked(plan_run(run, map_world(run.config, cluster, check=False)))
        streams_at_start.take(claim, plan)
        engine = RayEngine(plan.world, plan.path, plan.config.launcher, plan.command_of, say)
        plan = replace(plan, world=engine.place_all())
        run_dir.write_run_dir(plan)
        units = [unit.name for unit in ray_cluster.units_of(plan.world)]
        plan = replace(plan, commands=tuple(command for command in plan.commands if command.name in units))

        def engine_on(host: Host) -> RayEngine:
            names = (SECRET_VARIABLE, REDIS_PASSWORD_VARIABLE, *variables_of(plan.container))
            engine.set_secrets({name: host.environment[name] for name in names if name in host.environment})
            return engine

        ending = asyncio.run(supervise(plan, resumed=claim.resumed, lock=claim.lock, engine_on=engine_on))
    return report_exit(ending, plan.config)


START: Mapping[str, Callable[[Experiment, Claim], int]] = {"local": start_local, "ray": start_ray}
"""By `launcher.engine`."""


def follow(run: Experiment) -> int:
    """Run the roles of any other node than the first."""
    if run_dir.holds_finished(run.path, run.container, force_restart=run.config.force_restart):
        say(f"{run.path}: the run is finished")
        return 0
    return report_exit(asyncio.run(several_nodes.follow(checked(plan_run(run)))), run.config)


def report_finished(run: Experiment) -> int:
    say(f"the run in {run.path} is finished:")
    figures = read_debug_run(run.path)
    lines = debug_run_lines(figures, run.path) if figures else summary_lines(read_summary(run.path) or {}, run.path)
    for line in lines:
        say("  " + line)
    if figures:
        say("force_restart=true starts over")
        return 0
    length = "finetune.max_train_steps" if run.config.sft.epochs is None else "sft.epochs"
    say(f"raise {length} to go on, or force_restart=true to start over")
    return 0


def report_exit(ending: Ending, config: Config) -> int:
    """Print how the run ended and return the exit code."""
    if ending.restarts:
        say("restarts: " + ", ".join(f"{name} {count}" for name, count in ending.restarts.items()))
    # Standalone servers end only when they are stopped.
    if ending.kind == "done" or (config.debug.mode == "servers" and ending.kind == "stopped"):
        return 0
    if ending.kind == "stopped":
        once = " and ".join(asked_once(config))
        without = f" without {once}" if once else ""
        say(f"stopped by {ending.reason}; the same command{without} resumes {config.output_dir}")
    else:
        say("")
        say(f"the run failed{': ' + ending.reason if ending.reason else ''}")
        if ending.failure:
            say(str(ending.failure))
    return exit_code_of(ending.kind, ending.reason)
