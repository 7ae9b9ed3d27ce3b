"""The rendered batch script on a real SLURM of two nodes: it learns, saves when asked, resumes when queued again."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.slurm import render
from tests.slurm_host import is_installed, lose_node, node_back, slurm

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 900
MAX_STEPS = 64
LOST_AFTER_S = 40
PROGRAM = """#!/bin/bash
# In place of the launcher: an actor that ends when it may, on the first node, and a server on the second.
if [[ $* != *pipelinerl.launch* ]]; then exit 0; fi
cd {run}
mkdir -p conf actor_0 actor_llm_0
printf 'actor_0 0\\nactor_llm_0 1\\n' > conf/roles.txt
printf '#!/bin/bash\\ncd {run}; echo a >> started; until [[ -e may_end ]]; do sleep 0.5; done\\n' > actor_0/start.sh
printf '#!/bin/bash\\ncd {run}; echo s >> started; exec sleep 1000\\n' > actor_llm_0/start.sh
chmod +x */start.sh
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * RUN_TIMEOUT_S),
    pytest.mark.skipif(not is_installed(), reason="needs slurmctld, slurmd and slurm-client, and root"),
]


class Cluster:
    """SLURM's commands, and one job."""

    def __init__(self, env: dict[str, str], folder: Path):
        self.env, self.folder, self.job = env, folder, ""

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: str) -> None:
        (self.folder / "run.sbatch").write_text(script)
        self.job = re.findall(r"\d+", self.run("sbatch", "run.sbatch"))[-1]

    @property
    def state(self) -> str:
        return re.findall(r"JobState=(\w+)", self.run("scontrol", "show", "job", self.job))[0]

    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*-*.txt"))

    def until(self, condition: Callable[[], bool], bad: tuple[str, ...] = ()) -> None:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not condition():
            assert self.state not in bad, self.output()[-4000:]
            assert time.monotonic() < deadline, self.output()[-4000:]
            time.sleep(0.5)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with slurm(tmp_path / "slurm") as env:
        # Both nodes are this machine: roles tell them apart by their loopback addresses.
        names = {"PIPELINERL_HOSTS": "127.0.0.1,127.0.0.2", "PYTHONPATH": str(ROOT)}
        yield Cluster(env | names, tmp_path)


def trained_steps(run_dir: Path) -> int:
    path = run_dir / "metrics" / "finetune.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def test_rendered_script_learns_saves_when_asked_and_resumes_when_requeued(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ("--config-name=quickstart", f"output_dir={run_dir}", "world.cpu_slots=1", "wandb.mode=disabled")
    arguments += (f"finetune.max_train_steps={MAX_STEPS}", "+vllm_config.env.OMP_NUM_THREADS='1'")
    arguments += ("+vllm_config.env.VLLM_CPU_OMP_THREADS_BIND='0'",)  # both nodes share this machine's cores
    deployment = Deployment(arguments=arguments, nodes=2, python=sys.executable, workdir=str(ROOT), name="quick")
    cluster.submit(render(deployment))
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    cluster.until(lambda: trained_steps(run_dir) >= 4, bad=ended)

    cluster.run("scancel", "--signal=TERM", cluster.job)
    cluster.until(lambda: cluster.state in ended)
    saved = max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))
    assert 4 <= saved < MAX_STEPS
    assert "resumes" in cluster.output()
    assert cluster.state == "FAILED"  # exit code 143: the run is not done

    cluster.run("scontrol", "requeue", cluster.job)
    cluster.until(lambda: cluster.state == "COMPLETED", bad=("FAILED", "CANCELLED", "TIMEOUT"))
    summary = json.loads((run_dir / "summary.json").read_text())
    print(f"success {summary['success_before']:.3f} to {summary['success_after']:.3f}, saved at step {saved}")
    assert summary["optimizer_steps"] == MAX_STEPS
    assert summary["success_after"] > summary["success_before"] + 0.2
    assert f"event=resumed step={saved}" in (run_dir / "finetune_0" / "log.txt").read_text()
    assert {line.split()[0] for line in (run_dir / "conf" / "roles.txt").read_text().splitlines()} >= {"finetune_0"}
    assert os.stat(run_dir / "actor_0" / "start.sh").st_mode & 0o077 == 0
    assert read_ledger(run_dir).violations == ()


def end_srun(env: dict[str, str], role: str) -> None:
    """End the srun of a role as one that notices that its node is lost."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.environ().get("SLURM_CONF") == env["SLURM_CONF"]
            if is_ours and f"--job-name={role}" in process.cmdline():
                process.kill()


def test_lost_node_costs_no_restart_and_the_job_is_queued_again(tmp_path: Path) -> None:
    """Every launch on a lost node fails at once. SLURM gives the node up only after SlurmdTimeout."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (tmp_path / "program").write_text(PROGRAM.format(run=run_dir))
    (tmp_path / "program").chmod(0o755)
    deployment = Deployment(
        arguments=(f"output_dir={run_dir}",), nodes=2, python=str(tmp_path / "program"), workdir=str(ROOT), name="light"
    )

    def started() -> str:
        return "".join(sorted((run_dir / "started").read_text().split())) if (run_dir / "started").exists() else ""

    with slurm(tmp_path / "slurm", lost_after_s=LOST_AFTER_S) as env:
        cluster = Cluster(env, tmp_path)
        cluster.submit(render(deployment))
        cluster.until(lambda: started() == "as", bad=("FAILED", "COMPLETED"))
        lose_node(env, "n1")
        end_srun(env, "actor_llm_0")
        cluster.until(lambda: "Restarts=1" in cluster.run("scontrol", "show", "job", cluster.job), bad=("FAILED",))
        with node_back(env, "n1"):
            cluster.until(lambda: "idle" in cluster.run("sinfo", "-h", "-N", "-n", "n1", "-o", "%t"), bad=("FAILED",))
            cluster.run("scontrol", "update", f"JobId={cluster.job}", "StartTime=now")
            cluster.until(lambda: started() == "aass", bad=("FAILED",))
            (run_dir / "may_end").touch()
            cluster.until(lambda: cluster.state == "COMPLETED", bad=("FAILED",))
    assert "waiting up to 80 s for it, or until SLURM queues the job again" in cluster.output()
    assert "restart 1" not in cluster.output()
