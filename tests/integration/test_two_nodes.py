"""Two launchers in two network namespaces train together; a cut cable ends the run, a new start resumes it.

Each namespace is a node: its own addresses, its own ports, one cable between them. Node 0 has the inference server and
one trainer rank, node 1 two more (DeepSpeed ZeRO across the cable); topics travel through Redis.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.listening import heard_by_a_stranger, listening
from tests.namespaces import Nodes, are_possible, two_nodes

NODE_TIMEOUT_S, HEARTBEAT_S = 10, 30
"""Node 1, which cannot reach redis, waits for the sum, because redis may only be frozen."""
STOP_MARGIN_S = 30
"""Roles get `launcher.stop_timeout_s` (8 s) to end; the rest is a loaded machine."""
RUN_TIMEOUT_S = 900
MAX_STEPS = 400
"""The run is under way while a stranger asks some sixty ports."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * RUN_TIMEOUT_S),
    pytest.mark.skipif(not are_possible(), reason="network namespaces need root and ip"),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server"),
]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


class Launchers:
    """One launcher per node, started together."""

    def __init__(self, nodes: Nodes, run_dir: Path, secret: str, logs: Path, tls: bool):
        command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
        command += [
            "streams=redis",
            f"world.hosts=[{','.join(nodes.addresses)}]",
            "world.actor_fraction=1",
            "world.finetune_fraction=3",
            "use_deepspeed=true",
            "deepspeed_config=deepspeed_stage2_bf16",
            f"launcher.node_timeout_s={NODE_TIMEOUT_S}",
            f"launcher.heartbeat_timeout_s={HEARTBEAT_S}",
            f"finetune.max_train_steps={MAX_STEPS}",
            "finetune.save_checkpoint_steps=4",
            "weights.timeout_s=60",
            f"world.tls={tls}",
        ]
        self.outputs = [logs / f"node{rank}.txt" for rank in range(2)]
        self.processes = []
        for rank, name in enumerate(nodes.names):
            env = os.environ | {
                "WORLD_SIZE": "2",
                "RANK": str(rank),
                "MASTER_ADDR": nodes.addresses[0],
                "MASTER_PORT": "29500",
                "PIPELINERL_SECRET": secret,
            }
            with open(self.outputs[rank], "w") as output:
                self.processes.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", name, *command], env=env, stdout=output, stderr=subprocess.STDOUT
                    )
                )

    def said(self, rank: int) -> str:
        return self.outputs[rank].read_text()

    def wait(self, timeout_s: float) -> list[int]:
        deadline = time.monotonic() + timeout_s
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition: Callable[[], bool], timeout_s: float, launchers: Launchers) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        ended = [process.poll() for process in launchers.processes]
        assert ended == [None, None], f"a launcher ended: {ended}\n{launchers.said(0)}\n{launchers.said(1)}"
        assert time.monotonic() < deadline, launchers.said(0)[-3000:]
        time.sleep(0.2)


def trained_steps(run_dir: Path) -> int:
    path = run_dir / "metrics" / "finetune.jsonl"
    return json.loads(path.read_text().splitlines()[-1])["step"] if path.exists() and path.stat().st_size else 0


def check_what_a_stranger_reaches(nodes: Nodes, run_dir: Path, launchers: Launchers, tls: bool) -> None:
    """Every port is on loopback or on its node's address alone, and says nothing without the secret but its health."""
    found = listening(run_dir, [process.pid for process in launchers.processes])
    print({f"{address}:{port}": role for (address, port), role in found.items()})
    assert {address for address, _ in found} >= set(nodes.addresses), "the roles of both nodes listen"
    assert {address for address, _ in found} <= {"127.0.0.1", *nodes.addresses}, found
    for here, there in ((0, 1), (1, 0)):
        ports = [port for address, port in found if address == nodes.addresses[here]]
        stranger = ["ip", "netns", "exec", nodes.names[there]]
        for port, answers in heard_by_a_stranger(nodes.addresses[here], ports, stranger).items():
            role = found[nodes.addresses[here], port]
            print(role, port, answers)
            statuses = {p: a.split(" ")[1] for p, a in answers.items() if a.startswith("HTTP/") and p.startswith("/")}
            assert {status for path, status in statuses.items() if path != "/health"} <= {"401", "404", "405"}, answers
            if role.startswith("redis"):
                assert answers["redis"] == ("" if tls else "-NOAUTH Authentication required.")
            if tls:
                assert statuses == {}, "something speaks plain HTTP"


@pytest.mark.parametrize("tls", [False, True])
def test_two_nodes_train_survive_a_cut_and_resume(nodes: Nodes, tmp_path: Path, tls: bool):
    run_dir, secret = tmp_path / "run", secrets.token_hex(16)
    launchers = Launchers(nodes, run_dir, secret, tmp_path, tls)
    try:
        wait_for(lambda: trained_steps(run_dir) >= 6, RUN_TIMEOUT_S, launchers)
        assert {job.name for job in run_dir.glob("finetune_*")} == {"finetune_0", "finetune_1"}
        check_what_a_stranger_reaches(nodes, run_dir, launchers, tls)

        nodes.cable("down")
        cut = time.monotonic()
        codes = launchers.wait(NODE_TIMEOUT_S + HEARTBEAT_S + STOP_MARGIN_S)
        print(f"both launchers ended {time.monotonic() - cut:.1f} s after the cut")
        assert all(codes)
        for rank in (0, 1):
            assert f"node {1 - rank}" in launchers.said(rank)
            assert "node_timeout_s" in launchers.said(rank)
    finally:
        launchers.stop()
    lost_at = trained_steps(run_dir)
    assert lost_at < MAX_STEPS

    nodes.cable("up")
    launchers = Launchers(nodes, run_dir, secret, tmp_path, tls)
    try:
        assert launchers.wait(RUN_TIMEOUT_S) == [0, 0], launchers.said(0)[-3000:]
    finally:
        launchers.stop()
    assert "resuming" in launchers.said(0)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["optimizer_steps"] == MAX_STEPS
    assert summary["success_after"] > summary["success_before"] + 0.2
