"""The rendered batch script on a real SLURM: it learns, saves when asked, resumes when queued again, survives nodes."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.slurm import render
from tests.slurm_host import is_installed, lose_node, node_back, slurm

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 900
MAX_STEPS = 64
LOST_AFTER_S = 40
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
FAKES = Path(__file__).with_name("launcher_fakes.py")

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


class Light:
    """Light roles on three nodes of one cluster: servers on the first two, trainer and actor on the third."""

    def __init__(self, folder: Path, env: dict[str, str]):
        self.run_dir = folder / "run"
        self.cluster = Cluster(env | {"PIPELINERL_HOSTS": "127.0.0.2,127.0.0.3,127.0.0.4"}, folder)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        program = folder / "program"
        program.write_text(f'#!/bin/bash\nshift 2\nexec {sys.executable} {FAKES} launch "$@"\n')
        program.chmod(0o755)
        self.arguments = (
            *("--config-name=quickstart", f"output_dir={self.run_dir}", f"model_path={folder / 'model'}"),
            *("tiny_model=null", "finetune.max_train_steps=3", "world.cpu_slots=1", "world.actor_fraction=2"),
            *("world.finetune_fraction=1", f"world.run_id={folder}", "launcher.node_timeout_s=20"),
        )
        self.cluster.submit(
            render(Deployment(arguments=self.arguments, nodes=3, python=str(program), workdir=str(ROOT), name="light"))
        )

    def starts(self) -> list[str]:
        path = self.run_dir / "environment.jsonl"
        return [json.loads(line)["job"] for line in path.read_text().splitlines()] if path.exists() else []

    def until_started(self, times: int = 1) -> None:
        jobs = ("actor_llm_0", "actor_llm_1", "actor_0", "finetune_0")
        self.cluster.until(lambda: all(self.starts().count(job) == times for job in jobs), bad=ENDED)

    def until_queued_again(self, name: str) -> None:
        """Until the job runs again on all nodes, the lost one among them."""
        cluster = self.cluster
        cluster.until(lambda: "Restarts=1" in cluster.run("scontrol", "show", "job", cluster.job), bad=ENDED)
        cluster.until(lambda: "idle" in cluster.run("sinfo", "-h", "-N", "-n", name, "-o", "%t"), bad=ENDED)
        cluster.run("scontrol", "update", f"JobId={cluster.job}", "StartTime=now")

    def let_end(self) -> None:
        (self.run_dir / "may_end").touch()
        self.cluster.until(lambda: self.cluster.state == "COMPLETED", bad=ENDED)


@pytest.fixture
def light(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Light]:
    with slurm(tmp_path / "slurm", 3, lost_after_s=LOST_AFTER_S) as env:
        yield Light(tmp_path, env | {"FAKE_FINETUNE": request.param, "PYTHONPATH": str(ROOT)})


holding = pytest.mark.parametrize("light", ["held"], indirect=True)


@holding
def test_run_goes_on_without_a_lost_node_of_servers(light: Light) -> None:
    light.until_started()
    lose_node(light.cluster.env, "n1")
    light.cluster.until(lambda: "the run goes on without actor_llm_1" in light.cluster.output(), bad=ENDED)
    light.cluster.until(lambda: "down" in light.cluster.run("sinfo", "-h", "-N", "-n", "n1", "-o", "%t"), bad=ENDED)
    light.let_end()
    assert "Restarts=0" in light.cluster.run("scontrol", "show", "job", light.cluster.job)
    assert light.starts().count("finetune_0") == 1


@holding
@pytest.mark.parametrize("name", ["n0", "n2"])
def test_job_is_queued_again_when_a_node_is_lost_that_the_run_needs(light: Light, name: str) -> None:
    """The leading launcher and this script are on the first node, the trainer is on the last."""
    light.until_started()
    lose_node(light.cluster.env, name)
    if name == "n2":  # what the others say is not in the script's output if that is lost itself
        light.cluster.until(lambda: "node 2 (127.0.0.4) has been silent" in light.cluster.output(), bad=ENDED)
        light.cluster.until(lambda: "asking SLURM to queue the job again" in light.cluster.output(), bad=ENDED)
    light.cluster.until(
        lambda: "Restarts=1" in light.cluster.run("scontrol", "show", "job", light.cluster.job), bad=ENDED
    )
    with node_back(light.cluster.env, name):
        light.until_queued_again(name)
        light.until_started(times=2)
        light.let_end()


@pytest.mark.parametrize("light", ["refuse"], indirect=True)
def test_run_that_fails_on_nodes_that_answer_is_not_queued_again(light: Light) -> None:
    light.cluster.until(lambda: light.cluster.state in ENDED)
    shown = light.cluster.run("scontrol", "show", "job", light.cluster.job)
    assert [part in shown for part in ("JobState=FAILED", "Restarts=0", "ExitCode=1:0")] == [True] * 3
    assert "the domain raised on every rollout" in light.cluster.output()


@pytest.mark.parametrize("light", ["slow_save"], indirect=True)
def test_time_limit_s_warning_has_the_trainer_save(light: Light) -> None:
    """SIGTERM reaches the script, every launcher and every role at once."""
    light.until_started()
    light.cluster.until(lambda: "node 2 (127.0.0.4) is here" in light.cluster.output(), bad=ENDED)
    light.cluster.run("scancel", "--batch", "--signal=TERM", light.cluster.job)
    light.cluster.until(lambda: (light.run_dir / "saving").exists(), bad=ENDED)
    (light.run_dir / "may_save").touch()
    light.cluster.until(lambda: light.cluster.state in ENDED)
    assert (light.run_dir / "saved").exists()
    assert light.cluster.state == "FAILED"
    assert "ExitCode=143:0" in light.cluster.run("scontrol", "show", "job", light.cluster.job)
    assert "resumes" in light.cluster.output()
