"""Runs the roles of this node until the run has ended, beside them the reaper, the terminal's lines and Ctrl-C."""

import asyncio
import contextlib
import io
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pipelinerl.config.debug import working_kind
from pipelinerl.config.environment import (
    MIN_SECRET_CHARS,
    REDIS_PASSWORD_VARIABLE,
    SECRET_VARIABLE,
    derived_password,
)
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.ending import clear_ending
from pipelinerl.launcher.commands import inherited_environment
from pipelinerl.launcher.coordination import Coordination
from pipelinerl.launcher.engine import RoleEngine
from pipelinerl.launcher.following import TopicFollower
from pipelinerl.launcher.local import LocalEngine
from pipelinerl.launcher.model_build import build_tiny_model
from pipelinerl.launcher.processes import REAPER_GRACE_S, STOP_SIGNALS, Host, Reaper, RunMark
from pipelinerl.launcher.reporting import RunReports
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.launcher.supervisor import Ending, Supervisor
from pipelinerl.launcher.terminal import ProgressLines, RunLine, Terminal
from pipelinerl.launcher.tracking import RunTracking
from pipelinerl.membership.address import RedisAddress, address_of, publish_run
from pipelinerl.membership.stores import StoreAwayError
from pipelinerl.streams import backend_from_config
from pipelinerl.utils import is_healthy
from pipelinerl.world import WorldMap
from pipelinerl.world.proxies import bypass
from pipelinerl.world.tls import adopt

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two looks at redis or at servers that are starting."""

terminal = Terminal(lambda line: log.info("%s", line))
say = terminal.say

EngineOn = Callable[[Host], RoleEngine]
"""Makes the engine that runs the roles, from what they share."""


def show_world(plan: RunPlan) -> None:
    """Print the world as a table as wide as the terminal."""
    from rich.console import Console
    from rich.errors import ConsoleError

    from pipelinerl.plan.world_table import render_world

    with contextlib.suppress(ConsoleError):
        console, table = Console(), io.StringIO()
        drawing = Console(file=table, width=console.width, force_terminal=console.is_terminal)
        drawing.print(render_world(plan.config, plan.world))
        terminal.show(table.getvalue().rstrip())


async def supervise(
    plan: RunPlan,
    *,
    resumed: bool,
    lock: IO[str] | None = None,
    connection: Coordination | None = None,
    engine_on: EngineOn | None = None,
) -> Ending:
    """Start the roles and keep them running until the end.

    Args:
        resumed: the run folder has files of an earlier launch.
        lock: the run folder's. None: another launcher has it.
        connection: to the launchers of other nodes.
        engine_on: None = the engine of this node.
    """
    config, path, roles_started = plan.config, plan.path, time.time()
    held, owner = lock.fileno() if lock else None, f"{path} node {plan.node_rank}"
    reaper = Reaper(mark := RunMark(), grace_s=REAPER_GRACE_S, lock=held, owner=owner)
    bypass(os.environ, plan.world.hosts)
    environment = inherited_environment(os.environ) | adopt_secrets(plan) | {"TMPDIR": reaper.temporary}
    host = Host(run_dir=path, environment=environment, mark=mark)
    backend_from_config(config, path)
    tracking = None if plan.node_rank else RunTracking(config, path)
    reports = RunReports(config, path, say, tracking)
    clear_ending(path)
    follower = follow_topics(config, path, tracking)
    supervisor = Supervisor(
        plan.commands,
        engine_on(host) if engine_on else LocalEngine(host, [c.name for c in plan.commands], config.launcher, say),
        run_dir=path,
        limits=config.launcher,
        awaited=[job.name for job in plan.world.get(working_kind(config))],
        training_done=follower.training_done,
        say=say,
        report=(lambda: reports.complete(launched=plan.started, started=roles_started)) if tracking else (lambda: None),
        peers=connection,
        trains_on_several_nodes=len({job.node_rank for job in plan.world.get("finetune")}) > 1,
        standalone=config.debug.mode is not None or config.stage == "sft",
    )
    answer_signals(supervisor)
    say(f"{'resuming' if resumed else 'starting'} {path}")
    show_world(plan)
    try:
        with live_line(plan, path):
            ending = await accompanied(supervisor, work_beside(plan, host, supervisor, reaper, connection), follower)
        await reports.unfinished(ending, host)
        return ending
    finally:
        if tracking:
            tracking.close()
        reaper.dismiss()


async def accompanied(
    supervisor: Supervisor, beside: Iterator[Coroutine[Any, Any, None]], follower: TopicFollower
) -> Ending:
    """Run the supervisor and the other work, which ends with it. The run ends if that work fails."""
    tasks = [asyncio.create_task(work, name=getattr(work, "__qualname__", "")) for work in beside]
    for task in tasks:
        supervisor.rely_on(task)
    follower.start()
    try:
        return await supervisor.run()
    finally:
        for task in tasks:
            task.cancel()
        follower.stop()


def live_line(plan: RunPlan, path: Path) -> contextlib.AbstractContextManager[None]:
    """Show the line of a run on the leading node, but not for standalone servers or preprocessors."""
    if plan.node_rank or plan.config.debug.mode in ("servers", "preprocessor"):
        return contextlib.nullcontext()
    has_rollouts = plan.config.stage == "rl"
    return terminal.live(RunLine(path, plan.config.finetune.max_train_steps, has_rollouts=has_rollouts))


def work_beside(
    plan: RunPlan, host: Host, supervisor: Supervisor, reaper: Reaper, connection: Coordination | None
) -> Iterator[Coroutine[Any, Any, None]]:
    """Work while the supervisor runs."""
    yield reaper.keep()
    yield publish_address(plan, host.run_dir)
    if plan.config.debug.mode == "servers":
        yield tell_servers(plan.world)
    if plan.builds_model:
        yield build_model(plan.config, host, supervisor)
    if connection:
        yield connection.follow(supervisor)


def adopt_secrets(plan: RunPlan) -> dict[str, str]:
    """Put the run's secrets and its authority into this process's environment. Returns the secrets."""
    run_secrets = secrets_of(plan, os.environ)
    os.environ.update(run_secrets)
    adopt(plan.config.world, os.environ)
    return run_secrets


def answer_signals(supervisor: Supervisor) -> None:
    """Stop the run on a stop signal, and print that at once: a trainer's last save may take a while."""

    def stop(reason: str) -> None:
        say(f"{reason}: stopping; another Ctrl-C does not wait for anything")
        supervisor.request_stop(reason)

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, signal.Signals(number).name)


async def build_model(config: Config, host: Host, supervisor: Supervisor) -> None:
    """Build the tiny model while the roles start. The run ends if it cannot be built."""
    say(f"building the tiny model {config.model_path}")
    env = {**host.environment, **host.mark.variables("tiny_model")}
    problem = await build_tiny_model(config, env)
    if problem:
        supervisor.fail(problem)


async def publish_address(plan: RunPlan, path: Path) -> None:
    """Publish configuration and world on the run's redis, for roles on other machines, and print the address."""
    address = address_of(plan.config, path)
    if plan.node_rank or not isinstance(address, RedisAddress):
        return
    while True:
        try:
            await asyncio.to_thread(publish_run, address, path)
            break
        except StoreAwayError:  # redis is one of the roles that are starting
            await asyncio.sleep(POLL_S)
    if plan.world.is_open or plan.config.streams.external:
        say(f"servers may join with --run {address}")


def follow_topics(config: Config, path: Path, tracking: RunTracking | None) -> TopicFollower:
    """Return the run's follower. Its lines go to the terminal of the leading launcher, else to the log."""
    lines = ProgressLines(
        path,
        cfg=config,
        say=say if tracking else log.info,
        tracking=tracking,
        model=config.model_path if config.debug.mode == "evaluation" else None,
    )
    return TopicFollower(path, lines, last_step=config.finetune.max_train_steps)


def secrets_of(plan: RunPlan, env: Mapping[str, str]) -> dict[str, str]:
    """Return this run's secret (from `env`, or random) and its redis password (derived, or an external server's)."""
    given = env.get(SECRET_VARIABLE, "")
    needed = plan.world.is_open and plan.config.launcher.engine != "ray"  # over Ray the launcher gives it to all
    if needed and len(given) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"roles listen beyond this machine, but {SECRET_VARIABLE} is not set: give all machines of the run the "
            f"same random string of at least {MIN_SECRET_CHARS} characters, e.g. from `openssl rand -hex 32`"
        )
    secret = given if len(given) >= MIN_SECRET_CHARS else secrets.token_urlsafe(32)
    external = plan.config.streams.external and env.get(REDIS_PASSWORD_VARIABLE)
    return {SECRET_VARIABLE: secret, REDIS_PASSWORD_VARIABLE: external or derived_password(secret)}


async def tell_servers(world: WorldMap) -> None:
    """Print the setting with which another run uses these servers, once all of them answer."""
    urls = world.get_actor_urls()
    while True:
        if await asyncio.to_thread(lambda: all(map(is_healthy, urls))):
            break
        await asyncio.sleep(POLL_S)
    say(f"the servers answer until Ctrl-C: debug.existing_llms=[{','.join(urls)}]")
