"""The actor of one role watches it as the launcher of a node does. Ray itself is not needed for that."""

import asyncio
import dataclasses
import os
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher import watchdog
from pipelinerl.launcher.commands import RoleCommand
from pipelinerl.launcher.engine import RoleExit
from pipelinerl.launcher.ray_role import RoleActor, RolePlace
from pipelinerl.observability.status import STATUS_DIR
from pipelinerl.world import Job, Node, WorldMap
from tests.unit.observability.test_health import LIMITS, status

ALONE_S = 60.0
WAITS_FOR = "import pathlib, sys, time\nwhile not pathlib.Path({path!r}).exists(): time.sleep(0.02)\n"


def start(run_dir: Path, script: str, limits: LauncherSection = LIMITS) -> RoleExit:
    """Run a role of its own, which is this script, to its end."""
    job = Job(name="actor_0", kind="actor")
    nodes = (Node(rank=0, hostname="127.0.0.1", devices=1),)
    world = WorldMap(accelerator="cpu", nodes=nodes, jobs=(job,), master_port=1, weight_port=2, weight_ports=1)
    world.save(run_dir)
    (run_dir / RUN_CONFIG).touch()
    (run_dir / job.name).mkdir()
    command = RoleCommand(name=job.name, kind=job.kind, argv=(sys.executable, "-S", "-c", script), env={}, cores=())
    place = RolePlace(job=job.name, run_dir=str(run_dir), cwd=os.getcwd(), limits=limits, secrets={})
    actor = RoleActor(place, lambda *_: command)
    return asyncio.run(asyncio.wait_for(actor.run(), ALONE_S))


SILENT = """import json, pathlib, socket, time
offset = time.time() - time.monotonic()
own = dict(hostname=socket.gethostname(), clock_offset=offset)
fields = {fields!r} | own | dict.fromkeys(("heartbeat", "progress_at"), time.time())
pathlib.Path({path!r}).write_text(json.dumps(fields))
"""


def test_log_of_a_role_on_ray_stays_within_its_bound(tmp_path: Path) -> None:
    full = str(tmp_path / "actor_0" / "log.1.txt")
    script = "print('x' * 2**20, flush=True)\n" + WAITS_FOR.format(path=full)
    assert start(tmp_path, script, LIMITS.model_copy(update={"max_log_mb": 1})) == RoleExit(code=0)
    assert (tmp_path / "actor_0" / "log.1.txt").stat().st_size == 2**20 + 1


@pytest.mark.parametrize("gets_cpu", [True, False])
def test_silent_role_on_ray_is_frozen_unless_it_gets_no_cpu(
    gets_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a CPU its threads wait in a run queue for as long as it is silent."""
    enough = tmp_path / "enough"
    looks: list[int] = []

    def delays(pid: int) -> dict[int, float]:
        looks.append(pid)
        if len(looks) == 10 and not gets_cpu:
            enough.touch()
        return {1: 0.0 if gets_cpu else time.monotonic()}

    monkeypatch.setattr(watchdog, "WATCH_INTERVAL_S", 0.3)
    monkeypatch.setattr(watchdog, "QUIET_S", 0.0)
    monkeypatch.setattr(watchdog, "run_delays_s", delays)
    (tmp_path / STATUS_DIR).mkdir()
    path = str(tmp_path / STATUS_DIR / "actor_0.json")
    script = SILENT.format(fields=dataclasses.asdict(status("actor_0")), path=path) + WAITS_FOR.format(path=str(enough))
    end = start(tmp_path, script, LIMITS.model_copy(update={"heartbeat_timeout_s": 1.0}))
    if gets_cpu:
        assert (end.kill_reason or "").startswith("frozen: no heartbeat for ")
        assert list((tmp_path / "hangs").glob("*-actor_0/status.json"))
    else:
        assert end == RoleExit(code=0)
