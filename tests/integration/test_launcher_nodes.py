"""Several launchers, one run: they start together, and every one learns when another ends, dies or falls silent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FAKES = Path(__file__).with_name("launcher_fakes.py")
SECRET = "a-secret-that-both-nodes-share"
DEADLINE_S = 60.0
NODE_TIMEOUT_S = 3.0


class Nodes:
    """Two launchers on loopback addresses, with a shared run folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    def start(self, rank: int, *arguments: str, secret: str = SECRET, **behaviours: str) -> None:
        environment = {**os.environ, "WORLD_SIZE": "2", "RANK": str(rank), "PIPELINERL_SECRET": secret}
        environment |= {f"FAKE_{kind.upper()}": value for kind, value in behaviours.items()}
        command = [
            sys.executable,
            str(FAKES),
            "launch",
            "--config-name=quickstart",
            f"output_dir={self.folder / 'run'}",
            f"model_path={self.folder / 'model'}",
            "tiny_model=null",
            "finetune.max_train_steps=3",
            "world.hosts=[127.0.0.1,127.0.0.2]",
            "world.cpu_slots=1",
            f"world.run_id={self.folder}",
            f"launcher.node_timeout_s={NODE_TIMEOUT_S}",
            "launcher.startup_timeout_s=40",
            *arguments,
        ]
        with open(self.folder / f"{rank}.out", "w") as output:
            self.processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment))

    def output(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def wait(self) -> list[int]:
        return [process.wait(timeout=DEADLINE_S) for process in self.processes]

    def wait_for(self, rank: int, text: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while text not in self.output(rank):
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.output(rank)}"
            time.sleep(0.05)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    both = Nodes(tmp_path)
    yield both
    for process in both.processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def start_both(nodes: Nodes, *arguments: str, **behaviours: str) -> None:
    nodes.start(0, *arguments, **behaviours)
    nodes.start(1, *arguments, **behaviours)


def test_nodes_run_together_to_the_end(nodes: Nodes) -> None:
    start_both(nodes)
    assert nodes.wait() == [0, 0], nodes.output(0) + nodes.output(1)
    assert "step 3/3" in nodes.output(0)
    assert "0.250 → 0.750" in nodes.output(0)
    assert "step 3/3" not in nodes.output(1)
    assert (nodes.folder / "run" / "summary.json").exists()
    assert not list((nodes.folder / "run").glob(".launch-*"))


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 3.0), (signal.SIGSTOP, NODE_TIMEOUT_S + 3.0)])
@pytest.mark.parametrize("victim", [0, 1])
def test_nodes_loss_is_seen_by_the_other_in_time(
    nodes: Nodes, victim: int, number: signal.Signals, within_s: float
) -> None:
    start_both(nodes, finetune="endless")
    nodes.wait_for(0, "evaluation of version 0")
    nodes.processes[victim].send_signal(number)
    other = 1 - victim
    started = time.monotonic()
    nodes.wait_for(other, "the run failed: ")
    assert time.monotonic() - started < within_s + 8.0
    assert nodes.processes[other].wait(timeout=DEADLINE_S) == 1
    assert f"node {victim} (127.0.0.{victim + 1}" in nodes.output(other)


@pytest.mark.parametrize("asked", [0, 1])
def test_nodes_stop_request_ends_all(nodes: Nodes, asked: int) -> None:
    start_both(nodes, finetune="endless")
    nodes.wait_for(0, "evaluation of version 0")
    nodes.processes[asked].send_signal(signal.SIGINT)
    assert nodes.wait() == [130, 130]


def test_nodes_failure_on_one_is_told_by_all(nodes: Nodes) -> None:
    start_both(nodes, "launcher.max_restarts=0", finetune="crash")
    assert nodes.wait() == [1, 1]
    for rank in (0, 1):
        assert "finetune_0 failed: exit code 1" in nodes.output(rank)
        assert "RuntimeError: this role is broken" in nodes.output(rank)


def test_nodes_with_different_configurations_are_refused(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, "finetune.learning_rate=0.5")
    assert nodes.wait() == [2, 2]
    assert "node 1 (127.0.0.2) was started with another configuration" in nodes.output(0)
    assert "another configuration" in nodes.output(1)


def test_nodes_stranger_is_turned_away_and_the_run_waits(nodes: Nodes) -> None:
    nodes.start(0)
    nodes.start(1, secret="another-secret-of-some-length")
    assert nodes.processes[1].wait(timeout=DEADLINE_S) == 2
    assert "is PIPELINERL_SECRET the same on all nodes?" in nodes.output(1)
    nodes.start(1)
    assert [process.wait(timeout=DEADLINE_S) for process in (nodes.processes[0], nodes.processes[2])] == [0, 0]


def test_nodes_without_a_secret_are_refused(nodes: Nodes) -> None:
    nodes.start(0, secret="short")
    assert nodes.wait() == [2]
    assert "PIPELINERL_SECRET is not set" in nodes.output(0)


def test_nodes_that_never_come_are_named(nodes: Nodes) -> None:
    nodes.start(0, "launcher.startup_timeout_s=3")
    assert nodes.wait() == [2]
    assert "no launcher from 127.0.0.2 within launcher.startup_timeout_s=3 s" in nodes.output(0)
