"""The verifier as the launcher starts it: a process of its own that serves, reports, and ends cleanly."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node
from tests.ports import free_port

START_S = 120.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with one verifier."""
    port = free_port()
    cfg = compose("quickstart", [f"output_dir={tmp_path}", "world.verifier_replicas=1", "verifier.workers=1"])
    container = OmegaConf.to_container(cfg, resolve=True)
    container.pop("hydra", None)  # type: ignore[call-arg]
    (tmp_path / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(container), tmp_path / "conf" / "config.yaml")
    verifier = Job(name="verifier_0", kind="verifier", port=port, url=f"http://127.0.0.1:{port}")
    WorldMap(
        accelerator="cpu",
        nodes=(Node(rank=0, hostname="127.0.0.1", devices=1, cores=(0,)),),
        jobs=(verifier, Job(name="finetune_0", kind="finetune")),
        master_port=1,
        weight_port=2,
        weight_ports=1,
    ).save(tmp_path)
    return tmp_path


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    with (run_dir / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.domains.verifier", "--run-dir", str(run_dir), "--job", "verifier_0"],
            stdout=log,
            stderr=log,
            env=os.environ | {"PIPELINERL_SECRET": "s3cret"},
        )


def wait_until_up(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError(f"the verifier did not come up within {START_S:g} s")


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_role_serves_and_leaves_no_process_whatever_ends_it(run_dir, how):
    process = start(run_dir)
    try:
        url = WorldMap.load(run_dir).job("verifier_0").url
        wait_until_up(url, process)
        check = {"kind": "math", "prediction": "\\boxed{\\frac{2}{4}}", "gold": "0.5"}
        assert httpx.post(url, json=check, timeout=60).json()["status"] == "correct"
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2, "the forkserver and one worker"
        assert not any(b"s3cret" in Path(f"/proc/{child.pid}/environ").read_bytes() for child in children)
        process.send_signal(how)
        assert process.wait(60) == (0 if how == signal.SIGTERM else -how), (run_dir / "log.txt").read_text()
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive
    finally:
        process.kill()
        process.wait()


def test_used_port_ends_the_role_with_a_message(run_dir):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", WorldMap.load(run_dir).job("verifier_0").port))
        occupied.listen()
        process = start(run_dir)
        assert process.wait(START_S) != 0
    assert "address already in use" in (run_dir / "log.txt").read_text()
