"""The launcher's program, in order: validate, claim the folder, place, check, write, start, watch, stop, report.

It starts nothing before all checks have passed. It returns an exit code: 0 done, 1 failed, 2 refused, 130 and 143
interrupted.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import psutil
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config import rules
from pipelinerl.config.environment import (
    MIN_SECRET_CHARS,
    REDIS_PASSWORD_VARIABLE,
    SECRET_VARIABLE,
    derived_password,
)
from pipelinerl.config.load import missing_keys, must_be_given, parse_container, to_container
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.report import read_summary, summary_lines, write_report
from pipelinerl.launcher import checks, preflight, run_dir, stream_epoch
from pipelinerl.launcher.commands import (
    RoleCommand,
    compiler_cache,
    inherited_environment,
    role_command,
)
from pipelinerl.launcher.external import ROLES_FILE, write_roles_file
from pipelinerl.launcher.live import RunLine, Voice
from pipelinerl.launcher.nodes import Follower, Leader, NodeConnection, Rendezvous, plan_rendezvous
from pipelinerl.launcher.processes import STOP_SIGNALS, Reaper, RunMark
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.supervisor import Ending, Supervisor
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.membership.address import RedisAddress, address_of, publish_run
from pipelinerl.membership.stores import StoreAwayError
from pipelinerl.observability.logging import setup_launcher_logging
from pipelinerl.streams import backend_from_config
from pipelinerl.world import Job, WorldMap, build_world
from pipelinerl.world.cluster import read_node_environment

log = logging.getLogger(__name__)

EXIT_DONE, EXIT_FAILED = 0, 1
GUARDIAN_GRACE_S = 5.0
PUBLISH_RETRY_S = 0.5

CommandOf = Callable[[Job, WorldMap, Path, Mapping[str, str]], RoleCommand]


voice = Voice(lambda line: log.info("%s", line))
say = voice.say


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that is decided before the first process starts."""

    config: Config
    container: dict[str, Any]
    world: WorldMap
    node_rank: int
    commands: tuple[RoleCommand, ...]
    """Commands of this node's roles."""
    builds_model: bool = False
    """Whether `model_path` is a tiny model that must be built first."""


def launch(cfg: DictConfig, overrides: Sequence[str], *, command_of: CommandOf = role_command) -> int:
    """Run the experiment of a composed configuration and return the exit code. Raises PipelineRLError to refuse it."""
    os.umask(0o077)
    started = psutil.Process().create_time()
    missing = missing_keys(cfg) if cfg.dry_run else []
    for key in missing:  # a dry run shows the world of `base` alone, too
        OmegaConf.update(cfg, key, "not-given")
    container = to_container(cfg)
    path = Path(parse_container(container).output_dir).expanduser().resolve()
    container["output_dir"] = str(path)
    config = parse_container(container)
    rules.check(config)
    if config.dry_run:
        return dry_run(make_plan(config, container, path, command_of), path, overrides, command_of, missing)
    rank = read_node_environment(os.environ).rank
    if rank and config.launcher.engine == "local":
        return follow(make_plan(config, container, path, command_of), path, overrides, started)
    claim = run_dir.claim(path, container, force_restart=config.force_restart)
    with claim.lock:
        setup_launcher_logging(path / run_dir.LOG_FILE)
        if claim.finished:
            write_roles_file(path, ())
            return tell_finished(claim)
        plan = make_plan(config, container, path, command_of)
        plan = prepare(plan, path, overrides)
        begin_epoch_if_asked(claim, config)
        run_dir.write(path, container, plan.world, plan.commands)
        if config.launcher.engine == "external":
            return hand_over(plan, path, command_of)
        if len(plan.world.nodes) == 1:
            ending = asyncio.run(supervise(plan, path, claim.resumed, started, lock=claim.lock))
        else:
            ending = asyncio.run(lead(plan, claim, started))
    return tell_ending(ending, path)


def hand_over(plan: RunPlan, path: Path, command_of: CommandOf) -> int:
    """Write the files from which a platform starts every role, and build the tiny model if there is one."""
    if plan.builds_model:
        say(f"building the tiny model {plan.config.model_path}")
        problem = asyncio.run(preflight.build_tiny_model(plan.config, os.environ))
        if problem:
            raise ConfigError(problem)
    commands = [command_of(job, plan.world, path, os.environ) for job in plan.world.jobs]
    shared = compiler_cache(os.environ)
    run_dir.write_roles(path, [replace(command, env={**shared, **command.env}) for command in commands])
    write_roles_file(path, plan.world.jobs)
    say(f"{path} is ready: {len(plan.world.jobs)} roles are to be started, see {path / ROLES_FILE}")
    return EXIT_DONE


async def lead(plan: RunPlan, claim: Claim, started: float) -> Ending:
    """Run node 0 of several: meet the other launchers and start together."""
    connection = Leader(rendezvous_of(plan), tuple(node.hostname for node in plan.world.nodes))
    marker = run_dir.mark_folder(claim.path)
    try:
        await connection.meet(say, {"marker": marker.name, "resumed": claim.resumed})
        return await supervise(plan, claim.path, claim.resumed, started, connection, claim.lock)
    finally:
        await connection.close()
        marker.unlink(missing_ok=True)


def follow(plan: RunPlan, path: Path, overrides: Sequence[str], started: float) -> int:
    """Run any other node. If the run folder is shared, the leader owns it. Otherwise this node claims its own."""

    async def run() -> Ending:
        connection = Follower(rendezvous_of(plan))
        try:
            start = await connection.meet(say)
            if (path / str(start["marker"])).exists():
                run_dir.write_roles(path, plan.commands)
                setup_launcher_logging(path / f"launcher.{plan.node_rank}.log")
                return await supervise(plan, path, bool(start["resumed"]), started, connection)
            claim = run_dir.claim(path, plan.container, force_restart=plan.config.force_restart)
            with claim.lock:
                setup_launcher_logging(path / run_dir.LOG_FILE)
                begin_epoch_if_asked(claim, plan.config)
                run_dir.write(path, plan.container, plan.world, plan.commands)
                return await supervise(plan, path, bool(start["resumed"]), started, connection, claim.lock)
        finally:
            await connection.close()

    plan = prepare(plan, path, overrides)
    return tell_ending(asyncio.run(run()), path)


def begin_epoch_if_asked(claim: Claim, config: Config) -> None:
    if claim.resumed and config.resume == "checkpoint":
        stream_epoch.begin(claim.path, config, say)


def rendezvous_of(plan: RunPlan) -> Rendezvous:
    limits = plan.config.launcher
    return plan_rendezvous(
        plan.world,
        plan.node_rank,
        plan.container,
        os.environ,
        startup_s=limits.startup_timeout_s,
        node_s=limits.node_timeout_s,
    )


def tell_finished(claim: Claim) -> int:
    say(f"the run in {claim.path} is finished:")
    for line in summary_lines(read_summary(claim.path) or {}, claim.path):
        say("  " + line)
    say("raise finetune.max_train_steps to go on, or force_restart=true to start over")
    return EXIT_DONE


def prepare(plan: RunPlan, path: Path, overrides: Sequence[str]) -> RunPlan:
    """Run every check, tell the warnings, and return the plan with `builds_model` set."""
    started, checking = time.monotonic(), ["the plan"]
    with voice.live(lambda: f"checking {checking[-1]}, {time.monotonic() - started:.0f} s"):
        warnings = checks.check(start_of(plan, path, overrides), begin=checking.append)
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


def make_plan(config: Config, container: dict[str, Any], path: Path, command_of: CommandOf) -> RunPlan:
    """Compute the world and this node's commands. Starts and writes nothing."""
    world = build_world(config, os.environ)
    node_rank = read_node_environment(os.environ).rank
    commands = tuple(command_of(job, world, path, os.environ) for job in world.on_node(node_rank))
    return RunPlan(config=config, container=container, world=world, node_rank=node_rank, commands=commands)


def dry_run(plan: RunPlan, path: Path, overrides: Sequence[str], command_of: CommandOf, missing: Sequence[str]) -> int:
    """Print the world, all commands and the warnings of every check. Starts and writes nothing."""
    from pipelinerl.launcher.commands import printable

    if not missing:
        run_dir.check_folder(path, plan.container, force_restart=plan.config.force_restart)
    warnings = checks.check(start_of(plan, path, overrides), only_shown=True)
    show_world(plan)
    for job in plan.world.jobs:
        say("")
        say(f"# {job.name} on {job.hostname}")
        say(printable(command_of(job, plan.world, path, os.environ)))
    for warning in (*warnings, *([must_be_given(missing)] if missing else [])):
        say(f"warning: {warning}")
    say("dry run: nothing was started or written")
    return EXIT_DONE


def show_world(plan: RunPlan) -> None:
    """Print the world as a table as wide as the terminal."""
    from rich.console import Console
    from rich.errors import ConsoleError

    from pipelinerl.world.table import render_world

    with contextlib.suppress(OSError, ConsoleError):
        Console().print(render_world(plan.config, plan.world))


async def supervise(
    plan: RunPlan,
    path: Path,
    resumed: bool,
    started: float,
    connection: NodeConnection | None = None,
    lock: IO[str] | None = None,
) -> Ending:
    """Start the roles of this node and keep them running until the end. ``started`` is Unix time."""
    config, leads = plan.config, plan.node_rank == 0
    mark = RunMark()
    run_secrets = secrets_of(plan, os.environ)
    guard = Reaper(mark, grace_s=GUARDIAN_GRACE_S, lock=lock.fileno() if lock else None)
    environment = (
        inherited_environment(os.environ) | compiler_cache(os.environ) | run_secrets | {"TMPDIR": guard.temporary}
    )
    os.environ.update(run_secrets)
    backend_from_config(config, path)
    progress = follow_progress(config, path, say if leads else log.info)
    supervisor = Supervisor(
        plan.commands,
        run_dir=path,
        environment=environment,
        mark=mark,
        limits=config.launcher,
        actors=[job.name for job in plan.world.get("actor")],
        training_done=progress.training_done,
        say=say,
        report=(lambda: report(plan, path, started, roles_started)) if leads else (lambda: None),
        others=connection,
    )
    answer_signals(supervisor)
    say(f"{'resuming' if resumed else 'starting'} {path}")
    show_world(plan)
    roles_started = time.time()
    progress.start()
    beside = [asyncio.create_task(guard.keep()), asyncio.create_task(publish(plan, path))]
    if plan.builds_model:
        beside.append(asyncio.create_task(build_model(config, environment | mark.variables("tiny_model"), supervisor)))
    if connection:
        beside.append(asyncio.create_task(connection.follow(supervisor)))
    try:
        with voice.live(RunLine(path, config.finetune.max_train_steps)) if leads else contextlib.nullcontext():
            return await supervisor.run()
    finally:
        for task in beside:
            task.cancel()
        progress.stop()
        guard.dismiss()


def answer_signals(supervisor: Supervisor) -> None:
    """Stop the run on a stop signal, and say so at once because a trainer's last save may take a while."""

    def stop(reason: str) -> None:
        say(f"{reason}: stopping; another Ctrl-C does not wait for anything")
        supervisor.request_stop(reason)

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, signal.Signals(number).name)


async def build_model(config: Config, env: Mapping[str, str], supervisor: Supervisor) -> None:
    """Build the tiny model while the roles start. The run ends if it cannot be built."""
    say(f"building the tiny model {config.model_path}")
    problem = await preflight.build_tiny_model(config, env)
    if problem:
        supervisor.fail(problem)


async def publish(plan: RunPlan, path: Path) -> None:
    """Put what roles on other machines need to start on the run's redis, and say its address."""
    address = address_of(plan.config, path)
    if plan.node_rank or not isinstance(address, RedisAddress):
        return
    while True:
        try:
            await asyncio.to_thread(publish_run, address, path)
            break
        except StoreAwayError:  # redis is one of the roles that are starting
            await asyncio.sleep(PUBLISH_RETRY_S)
    if plan.world.is_open or plan.config.streams.external:
        say(f"servers may join with --run {address}")


def follow_progress(config: Config, path: Path, show: Callable[[str], Any]) -> ProgressLines:
    return ProgressLines(
        path,
        max_train_steps=config.finetune.max_train_steps,
        say=show,
        steps_per_update=max(config.finetune.weight_update_interval, config.steps_per_phase),
    )


def secrets_of(plan: RunPlan, env: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets of this run: the secret in `env`, which roles on other machines know too, or a random one.

    The redis password is derived from the secret, except that the password of an external server is taken from `env`.
    """
    given = env.get(SECRET_VARIABLE, "")
    if plan.world.is_open and len(given) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"roles listen beyond this machine, but {SECRET_VARIABLE} is not set: give all machines of the run the "
            f"same random string of at least {MIN_SECRET_CHARS} characters, e.g. from `openssl rand -hex 32`"
        )
    secret = given if len(given) >= MIN_SECRET_CHARS else secrets.token_urlsafe(32)
    external = plan.config.streams.external and env.get(REDIS_PASSWORD_VARIABLE)
    return {SECRET_VARIABLE: secret, REDIS_PASSWORD_VARIABLE: external or derived_password(secret)}


def report(plan: RunPlan, path: Path, launched: float, started: float) -> None:
    """Write summary, picture and page. If that fails the run still counts as finished."""
    try:
        replicas = plan.config.world.replicas
        summary = write_report(path, replicas=replicas, launched=launched, started=started, seed=plan.config.seed)
    except Exception as error:  # the report is an extra: its failure is only reported
        log.exception("event=report_failed")
        say(f"warning: no summary: {type(error).__name__}: {error}")
        return
    say("")
    for line in summary_lines(summary, path):
        say(line)
    write_html(path)


def write_html(path: Path) -> None:
    """Write the HTML page about the run."""
    from pipelinerl.inspect.page.build import REPORT_FILE, write_page

    try:
        write_page([path], path / REPORT_FILE)
    except Exception as error:  # as above
        log.exception("event=page_failed")
        say(f"warning: no {REPORT_FILE}: {type(error).__name__}: {error}")


def tell_ending(ending: Ending, path: Path) -> int:
    if ending.restarts:
        say("restarts: " + ", ".join(f"{name} {count}" for name, count in ending.restarts.items()))
    if ending.kind == "done":
        return EXIT_DONE
    if ending.kind == "stopped":
        say(f"stopped by {ending.reason}; the same command resumes {path}")
        return 128 + signal.Signals[ending.reason].value
    say("")
    say(f"the run failed{': ' + ending.reason if ending.reason else ''}")
    if ending.failure:
        say(str(ending.failure))
    return EXIT_FAILED
