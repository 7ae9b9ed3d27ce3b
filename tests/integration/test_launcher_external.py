"""`launcher.engine=external` writes all that a platform needs, starts nothing, and does so again for a resume."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.world import WorldMap


def prepare(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "model").mkdir(exist_ok=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    command = [
        *(sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={tmp_path / 'run'}"),
        *(f"model_path={tmp_path / 'model'}", "tiny_model=null", "launcher.engine=external", *arguments),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PIPELINERL_SECRET"} | variables
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("hosts", [pytest.param("", marks=pytest.mark.slow), "127.0.0.1,127.0.0.2"])
def test_every_role_of_every_node_is_written_and_none_started(tmp_path: Path, hosts: str) -> None:
    several = {"WORLD_SIZE": "2", "RANK": "0", "PIPELINERL_HOSTS": hosts} if hosts else {}
    for _ in range(2):
        done = prepare(tmp_path, "world.run_id=x", **several)
        assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "run"
    world = WorldMap.load(run_dir)
    roles = [line.split() for line in (run_dir / "conf" / "roles.txt").read_text().splitlines()]
    assert roles == [[job.name, str(job.node_rank)] for job in world.jobs]
    assert {rank for _, rank in roles} == ({"0", "1"} if hosts else {"0"})
    for name, _ in roles:
        script = (run_dir / name / "start.sh").read_text()
        assert f"--run-dir {run_dir} --job {name}" in script
        assert not (run_dir / name / "log.txt").exists()
    assert not (run_dir / "status").exists()
