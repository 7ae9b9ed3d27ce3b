"""An environment server of a user's own, as the launcher starts it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose
from pipelinerl.observability.status import read_statuses
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node
from tests.ports import free_port
from tests.sender_kit import wait_for

START_S = 120.0
DICE = """
import http.server


class Dice:
    def __init__(self, sides):
        self.sides = sides

    def launch(self, port):
        sides = self.sides

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/end":
                    raise SystemExit
                body = str(sides).encode()
                self.send_response(200 if self.path == "/sides" else 404)
                self.end_headers()
                self.wfile.write(body)

        http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def role(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "my_dice.py").write_text(DICE)
    port = free_port()
    cfg = compose("quickstart", [f"output_dir={tmp_path}"])
    container = OmegaConf.to_container(cfg, resolve=True)
    container.pop("hydra", None)  # type: ignore[call-arg]
    container["environments"] = [{"key": "dice", "_target_": "my_dice.Dice", "sides": 20}]
    (tmp_path / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(container), tmp_path / "conf" / "config.yaml")
    url = f"http://127.0.0.1:{port}"
    served = {"environment_key": "dice", "environment_index": 0}
    WorldMap(
        accelerator="cpu",
        nodes=(Node(rank=0, hostname="127.0.0.1", devices=1, cores=(0,)),),
        jobs=(
            Job(name="environment_0", kind="environment", port=port, url=url, **served),
            Job(name="finetune_0", kind="finetune"),
        ),
        master_port=1,
        weight_port=2,
        weight_ports=1,
    ).save(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pipelinerl.domains.environments",
                "--run-dir",
                str(tmp_path),
                "--job",
                "environment_0",
            ],
            stdout=log,
            stderr=log,
            env=os.environ | {"PIPELINERL_SECRET": "s3cret", "PYTHONPATH": path},
        )
    try:
        wait_for(lambda: answers(url) or process.poll() is not None, START_S)
        yield process
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/sides", timeout=60).text == "20"
    except httpx.TransportError:
        return False


def is_ready(run_dir: Path) -> bool:
    status = read_statuses(run_dir).get("environment_0")
    return status is not None and status.progress_count > 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_role_serves_the_users_class_and_leaves_nothing(
    role: subprocess.Popen[bytes], how: signal.Signals, tmp_path: Path
) -> None:
    assert answers(WorldMap.load(tmp_path).job("environment_0").url), (tmp_path / "log.txt").read_text()
    wait_for(lambda: is_ready(tmp_path), START_S)
    children = psutil.Process(role.pid).children(recursive=True)
    assert len(children) == 2, "the server and its keeper"
    role.send_signal(how)
    assert role.wait(60) == (0 if how == signal.SIGTERM else -how), (tmp_path / "log.txt").read_text()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_server_that_ends_fails_the_role_so_that_it_is_started_again(
    role: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    url = WorldMap.load(tmp_path).job("environment_0").url
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/end", timeout=5)
    assert role.wait(START_S) == 1
    assert "environment 'dice' ended with code 0" in (tmp_path / "log.txt").read_text()
