"""A run on several nodes without Ray: each has a launcher, and node 0 leads.

`lead` starts its roles at once. `follow` waits for the leader's lease, and claims a run folder of its own if the
leader's is not here. The error of one launcher reaches the others by its lease.
"""

import os

from pipelinerl.errors import PipelineRLError
from pipelinerl.launcher import run_dir, streams_at_start
from pipelinerl.launcher.coordination import Coordination
from pipelinerl.launcher.peers import plan_peers
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.launcher.running import adopt_secrets, say, supervise
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.membership.address import address_of, open_store
from pipelinerl.membership.lease import LauncherNote
from pipelinerl.observability.logging import setup_launcher_logging


async def lead(plan: RunPlan, claim: Claim, *, old_streams: bool) -> Ending:
    """Run node 0 of several. Its roles start at once, and the other launchers follow."""
    connection = _coordination_of(plan)
    await connection.find_no_rival()
    marker = run_dir.mark_folder(plan.path)
    try:
        connection.take_part(marker=marker.name, resumed=claim.resumed, old_streams=old_streams)
        return await supervise(plan, resumed=claim.resumed, lock=claim.lock, connection=connection)
    except (PipelineRLError, OSError) as error:
        await connection.tell_failure(error)
        raise
    finally:
        connection.close()
        marker.unlink(missing_ok=True)


async def follow(plan: RunPlan) -> Ending:
    """Run the roles of a node that follows, once its leader is there."""
    connection = _coordination_of(plan)
    try:
        leader = await connection.meet()
        if leader.ending == "done":
            say(f"{plan.path}: the run is finished")
            return Ending(kind="done")
        return await _run_part(plan, leader, connection)
    except (PipelineRLError, OSError) as error:
        await connection.tell_failure(error)
        raise
    finally:
        connection.close()


async def _run_part(plan: RunPlan, leader: LauncherNote, connection: Coordination) -> Ending:
    """Run the roles in the leader's folder if this node shares it, else in one of its own."""
    if plan.config.streams.backend == "files" or (plan.path / leader.marker).exists():  # leases in the folder
        run_dir.write_roles(plan.path, plan.commands)
        setup_launcher_logging(plan.path / f"launcher.{plan.node_rank}.log", plan.config.launcher.max_log_mb)
        return await supervise(plan, resumed=leader.resumed, connection=connection)
    claim = run_dir.claim(plan.path, plan.container, force_restart=plan.config.force_restart)
    with run_dir.holding(claim):
        setup_launcher_logging(plan.path / run_dir.LOG_FILE, plan.config.launcher.max_log_mb)
        streams_at_start.follow(claim, plan, leader)
        run_dir.write_run_dir(plan)
        return await supervise(plan, resumed=leader.resumed, lock=claim.lock, connection=connection)


def _coordination_of(plan: RunPlan) -> Coordination:
    """Return this launcher's part among the launchers of all nodes. Adopts the run's secrets."""
    address = address_of(plan.config, plan.path, plan.world)
    rank, limits = plan.node_rank, plan.config.launcher
    on_redis = plan.config.streams.backend == "redis"
    peers = plan_peers(plan.world, rank, plan.container, os.environ, limits, str(address), on_redis=on_redis)
    adopt_secrets(plan)
    return Coordination(peers, open_store(address), say)
