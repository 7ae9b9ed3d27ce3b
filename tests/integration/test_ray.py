"""`launcher.engine=ray`: light roles on a cluster of this machine, and the quickstart on a cluster of four nodes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.status import read_statuses
from tests.ray_nodes import ENVIRONMENT, RayNodes, ray_nodes

FAKES = Path(__file__).with_name("launcher_fakes.py")
FAKES_TIMEOUT_S = 600
RUN_TIMEOUT_S = 1500
PRODUCT = ("-m", "pipelinerl.launch")
STEP_OF_LOSS = 16
SERVERS = ("actor_llm_1", "actor_llm_0")
SAVES = "finetune.save_checkpoint_steps=16"


@pytest.mark.slow
@pytest.mark.timeout(2 * FAKES_TIMEOUT_S)
def test_roles_of_a_local_cluster_restart_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    command = [sys.executable, str(FAKES), "launch", "--config-name=quickstart", f"output_dir={tmp_path / 'run'}"]
    command += [f"model_path={tmp_path / 'model'}", "tiny_model=null", "finetune.max_train_steps=3"]
    command += ["launcher.restart_backoff_s=0.1", "launcher.engine=ray"]
    env = os.environ | {"FAKE_FINETUNE": "crash_once"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=FAKES_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finetune_0: exit code 1; RuntimeError: this role stumbled; restart 1/3" in done.stdout
    starts = [json.loads(line) for line in (tmp_path / "run" / "environment.jsonl").read_text().splitlines()]
    assert sorted(start["job"] for start in starts) == ["actor_0", "actor_llm_0", *["finetune_0"] * 2, "preprocessor_0"]
    assert not [start["pid"] for start in starts if psutil.pid_exists(start["pid"])]
    assert not [name for start in starts for name in start["env"] if name.startswith("RAY_")]
    assert len({start["env"]["PIPELINERL_SECRET"] for start in starts}) == 1


@pytest.mark.slow
@pytest.mark.timeout(2 * FAKES_TIMEOUT_S)
def test_run_ends_with_the_reason_when_its_own_cluster_has_lost_its_last_node(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = [f"model_path={tmp_path / 'model'}", "tiny_model=null"]
    fakes = {"FAKE_FINETUNE": "endless"}
    program = (str(FAKES), "launch")
    launch = Launch(tmp_path, "null", "--config-name=quickstart", *settings, program=program, **fakes)
    try:
        launch.until(lambda: len(starts(launch.run_dir)) == 4)
        for process in psutil.Process(launch.process.pid).children(recursive=True):
            if process.name() == "raylet":
                process.kill()
        assert launch.process.wait(FAKES_TIMEOUT_S) == 1, launch.said[-4000:]
    finally:
        launch.end()
    assert "its node is lost, and the cluster that the launcher started has no other" in launch.said
    assert "restart" not in launch.said


class Launch:
    """A launcher on a Ray cluster."""

    def __init__(self, folder: Path, address: str, *arguments: str, program: tuple[str, ...] = PRODUCT, **fakes: str):
        self.run_dir, self._output = folder / "run", folder / "launcher.txt"
        command = [sys.executable, *program, *arguments, f"output_dir={self.run_dir}"]
        command += ["launcher.engine=ray", f"launcher.ray_address={address}", "wandb.mode=disabled"]
        with open(self._output, "w") as output:
            env = os.environ | ENVIRONMENT | fakes
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    @property
    def said(self) -> str:
        return self._output.read_text()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < deadline, self.said[-4000:]
            time.sleep(0.2)

    def nodes_of(self, unit: str) -> list[str]:
        placed = re.findall(rf"placed unit={unit} nodes=(\S+)", (self.run_dir / "launcher.log").read_text())
        return placed[-1].split(",")

    @property
    def step(self) -> int:
        path = self.run_dir / "metrics" / "finetune.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    with ray_nodes([3, 1, 1, 1], os.environ, tmp_path / "ray.txt") as nodes:
        yield nodes


@pytest.mark.slow
@pytest.mark.timeout(2 * FAKES_TIMEOUT_S)
def test_light_roles_of_a_lost_node_are_placed_again_at_no_restart(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = [f"model_path={tmp_path / 'model'}", "tiny_model=null", "finetune.max_train_steps=3"]
    settings += ["world.cpu_slots=1", "world.actor_fraction=3", "world.finetune_fraction=1"]
    fakes = {"FAKE_FINETUNE": "endless"}
    with ray_nodes([3, 1, 1, 1], os.environ | fakes, tmp_path / "ray.txt") as nodes:
        program = (str(FAKES), "launch")
        launch = Launch(tmp_path, nodes.address, "--config-name=quickstart", *settings, program=program, **fakes)
        try:
            launch.until(lambda: len(starts(launch.run_dir)) == 6)
            lost = next(name for name in SERVERS if launch.nodes_of(name) != [nodes.head])
            before = launch.nodes_of(lost)
            nodes.do(f"remove {before[0]}")
            launch.until(lambda: f"{lost}: its node is lost; it is placed again" in launch.said)
            nodes.do("add")
            launch.until(lambda: starts(launch.run_dir).count(lost) == 2)
            assert launch.nodes_of(lost) != before
            assert "restart" not in launch.said
            launch.process.send_signal(signal.SIGTERM)
            assert launch.process.wait(FAKES_TIMEOUT_S) == 128 + signal.SIGTERM
        finally:
            launch.end()


def starts(run_dir: Path) -> list[str]:
    """Names of the light roles, once for each start."""
    path = run_dir / "environment.jsonl"
    return [json.loads(line)["job"] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_run_on_four_nodes_learns_while_a_node_is_lost_and_replaced_and_a_trainer_rank_dies(
    nodes: RayNodes, tmp_path: Path
) -> None:
    own_core = ("+vllm_config.env.OMP_NUM_THREADS='1'", "+vllm_config.env.VLLM_CPU_OMP_THREADS_BIND='0'")
    launch = Launch(tmp_path, nodes.address, "--config-name=quickstart_ranks", "world.cpu_slots=1", *own_core, SAVES)
    try:
        launch.until(lambda: launch.step >= STEP_OF_LOSS)
        lost = next(name for name in SERVERS if launch.nodes_of(name) != [nodes.head])
        before = launch.nodes_of(lost)
        nodes.do(f"remove {before[0]}")
        launch.until(lambda: f"{lost}: its node is lost" in launch.said)
        nodes.do("add")
        launch.until(lambda: launch.nodes_of(lost) != before)
        assert "restart 1/" not in launch.said  # a lost node is no failure of a role
        launch.until(lambda: launch.step >= 3 * STEP_OF_LOSS)
        os.kill(read_statuses(launch.run_dir)["finetune_1.rank1"].pid, signal.SIGKILL)
        launch.until(lambda: "restart 1/3" in launch.said)
        assert launch.process.wait(RUN_TIMEOUT_S) == 0, launch.said[-4000:]
    finally:
        launch.end()
    summary = json.loads((launch.run_dir / "summary.json").read_text())
    print(f"success {summary['success_before']:.3f} to {summary['success_after']:.3f}, {summary['wall_s']:.0f} s")
    assert summary["success_after"] >= 0.8
    assert read_ledger(launch.run_dir).violations == ()
    assert "restarts: finetune_0 1" in launch.said
    log = (launch.run_dir / "finetune_0" / "log.txt").read_text()
    assert [int(step) for step in re.findall(r"event=resumed step=(\d+)", log)][-1] >= STEP_OF_LOSS
