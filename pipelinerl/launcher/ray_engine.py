"""`launcher.engine=ray`: every role is the child of a Ray actor, placed by Ray in a placement group.

A role that is started again after the loss of its node waits until Ray has room for it. The trainer's ranks are one
unit, which ends and starts as a whole. The launcher writes addresses to `conf/world.json`.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.commands import CommandOf, RoleCommand
from pipelinerl.launcher.engine import RoleExit, stop_in_waves
from pipelinerl.launcher.losses import NodeLost
from pipelinerl.launcher.processes import second_signal
from pipelinerl.launcher.ray_cluster import Unit, alive_nodes, units_of, world_at
from pipelinerl.launcher.ray_role import RoleActor, RolePlace
from pipelinerl.launcher.reaper import KILL_TIMEOUT_S
from pipelinerl.membership.role import EXIT_FAILED
from pipelinerl.world import WorldMap

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two questions to Ray's head."""
TOLD_AFTER_S = 20.0
"""The user is told of a wait after this time: Ray needs seconds for a placement group that it has room for."""
LOSS_S = 60.0
"""Ray takes up to this long to report the loss of a node whose actor does not answer."""
STOP_MARGIN_S = KILL_TIMEOUT_S + 10.0
"""After its role's time an actor sweeps, and its answer travels."""


@dataclass
class Placed:
    """A unit and where Ray has put it."""

    unit: Unit
    group: Any = None
    """Ray's placement group."""
    nodes: tuple[str, ...] = ()
    """Ray's ids of the nodes, one for each job."""
    actors: list[Any] = field(default_factory=list)
    task: "asyncio.Task[RoleExit | NodeLost] | None" = None


class RayEngine:
    """Runs the roles of a world on the Ray cluster to which this process is connected.

    Args:
        world: as planned. ``place_all`` replaces its addresses by Ray's.
        command_of: builds a role's command on its node.
        say: prints a line for the user.
    """

    def __init__(
        self,
        world: WorldMap,
        run_dir: Path,
        limits: LauncherSection,
        command_of: CommandOf,
        say: Callable[[str], None],
    ):
        self.world = world
        self._secrets: Mapping[str, str] = {}
        self._run_dir, self._limits = run_dir, limits
        self._command_of, self._say = command_of, say
        self._placed = {unit.name: Placed(unit) for unit in units_of(world)}

    def set_secrets(self, secrets: Mapping[str, str]) -> None:
        """Set variables with secrets of every role that starts from now on."""
        self._secrets = dict(secrets)

    def place_all(self) -> WorldMap:
        """Reserve resources for every role and return the world with the addresses of their nodes.

        Raises:
            ConfigError: Ray did not have the resources within `launcher.startup_timeout_s`.
        """
        deadline = time.monotonic() + self._limits.startup_timeout_s
        for placed in self._placed.values():
            asyncio.run(self._reserve(placed, deadline))
        return self.world

    def start(self, command: RoleCommand) -> None:
        placed = self._placed[command.name]
        placed.task = asyncio.create_task(self._run(placed))

    async def exit_of(self, name: str) -> RoleExit | NodeLost:
        task = self._placed[name].task
        assert task is not None, "start() comes first"
        return await task

    async def watch(self) -> None:
        """Does nothing, because each actor watches its own role."""

    def stop_all(self, *, orderly: bool, may_save: bool, report: Callable[[], None]) -> None:
        for placed in self._placed.values():
            if placed.task is not None:
                placed.task.cancel()
        with second_signal() as hurried:

            def stop_wave(kinds: Collection[str], limit_s: float) -> None:
                wave = [placed for placed in self._placed.values() if placed.unit.kind in kinds]
                self._stop_wave(wave, limit_s, may_save, hurried)

            kinds = {placed.unit.kind for placed in self._placed.values()}
            stop_in_waves(kinds, stop_wave, self._limits, orderly=orderly, report=report)
        for placed in self._placed.values():
            self._remove(placed)

    def _stop_wave(self, wave: list[Placed], limit_s: float, may_save: bool, hurried: Callable[[], bool]) -> None:
        """Ask these roles to end and wait for it. Their actors find out whether there is a step to save."""
        import ray

        refs = [actor.stop.remote(limit_s, may_save) for placed in wave for actor in placed.actors]
        has_trainer = may_save and any(placed.unit.kind == "finetune" for placed in wave)
        longest_s = max(limit_s, self._limits.save_timeout_s) if has_trainer else limit_s
        deadline = time.monotonic() + longest_s + STOP_MARGIN_S
        while refs and time.monotonic() < deadline and not hurried():
            _, refs = ray.wait(refs, num_returns=len(refs), timeout=POLL_S)

    async def _run(self, placed: Placed) -> RoleExit | NodeLost:
        """Run a unit to the exit of its processes, or until its node is lost."""
        import ray

        if placed.group is None:
            await self._reserve(placed, None)
        try:
            return await self._run_once(placed)
        except ray.exceptions.RayActorError as error:
            log.warning("event=ray_actor_lost unit=%s reason=%s", placed.unit.name, error)
            nodes = set(placed.nodes)
            await self._kill(placed)  # new ranks need the GPUs and the port of those on other nodes
            self._remove(placed)
            if not await self._is_lost(nodes):
                return RoleExit(code=EXIT_FAILED, kill_reason="Ray ended its worker")
        others = [p.unit.kind for p in self._placed.values() if p is not placed and not nodes & set(p.nodes)]
        lost = NodeLost(name="its node", kinds=(placed.unit.kind,), elsewhere=others, is_placed_again=True)
        if self._limits.ray_address is None and not alive_nodes():  # no node can join the launcher's own cluster
            reason = "is lost, and the cluster that the launcher started has no other"
            return replace(lost, reason=reason, elsewhere=(), is_placed_again=False)
        return lost

    async def _run_once(self, placed: Placed) -> RoleExit:
        """Start the unit's processes and return its end: the first failure, or that of the last process."""
        self._make_actors(placed)
        runs = [asyncio.ensure_future(value_of(actor.run.remote())) for actor in placed.actors]
        result = RoleExit(code=0)
        for done in asyncio.as_completed(runs):
            result = await done
            if result.code:
                break
        if result.code:
            await self._kill(placed)
            await asyncio.gather(*runs, return_exceptions=True)
        return result

    async def _kill(self, placed: Placed) -> None:
        """End the processes of a unit and wait for actors that answer."""
        kills = [value_of(actor.kill.remote()) for actor in placed.actors]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*kills, return_exceptions=True), STOP_MARGIN_S)

    def _make_actors(self, placed: Placed) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for actor in placed.actors:
            ray.kill(actor)
        placed.actors = []
        for index, (job, bundle) in enumerate(zip(placed.unit.jobs, placed.unit.bundles, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(placed.group, placement_group_bundle_index=index)
            options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}
            place = RolePlace(
                job=job.name,
                run_dir=str(self._run_dir),
                cwd=os.getcwd(),
                limits=self._limits,
                secrets=dict(self._secrets),
            )
            remote = ray.remote(RoleActor).options(**options)
            placed.actors.append(remote.remote(place, self._command_of))

    async def _reserve(self, placed: Placed, deadline: float | None) -> None:
        """Wait until Ray has room for the unit, and note where. ``deadline``: monotonic time, None = no limit."""
        from ray.util.placement_group import placement_group, placement_group_table

        unit, started, told = placed.unit, time.monotonic(), False
        placed.group = placement_group([dict(bundle) for bundle in unit.bundles], strategy="PACK")
        while (table := placement_group_table(placed.group))["state"] != "CREATED":
            now = time.monotonic()
            wanted = " and ".join(str(dict(bundle)) for bundle in unit.bundles)
            if deadline is not None and now > deadline:
                raise ConfigError(
                    f"{unit.name}: Ray had no {wanted} free within launcher.startup_timeout_s="
                    f"{self._limits.startup_timeout_s:g} s: add nodes, or plan a smaller world"
                )
            if not told and now - started > TOLD_AFTER_S:
                self._say(f"{unit.name}: waiting for Ray to have {wanted} free")
                told = True
            await asyncio.sleep(POLL_S)
        ids = table["bundles_to_node_id"]
        placed.nodes = tuple(ids[index] for index in range(len(unit.jobs)))
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}
        pairs = zip(unit.jobs, placed.nodes, strict=True)
        self.world = world_at(self.world, {job.name: addresses[node] for job, node in pairs if node in addresses})
        log.info("event=unit_placed unit=%s nodes=%s", unit.name, ",".join(placed.nodes))
        if deadline is None:
            self.world.save(self._run_dir)

    async def _is_lost(self, nodes: set[str]) -> bool:
        """Whether one of these nodes has left the cluster."""
        deadline = time.monotonic() + LOSS_S
        while time.monotonic() < deadline:
            if not nodes <= {node["NodeID"] for node in alive_nodes()}:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _remove(self, placed: Placed) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in placed.actors:
            ray.kill(actor)
        if placed.group is not None:
            remove_placement_group(placed.group)
        placed.actors, placed.group = [], None


async def value_of(ref: Any) -> Any:
    """Wait for the value of an object reference. Raises what the actor raised, or that it is gone."""
    return await asyncio.wrap_future(ref.future())
