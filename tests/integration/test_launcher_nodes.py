"""Several launchers, one run: they meet by leases, and every one learns when another ends, dies or falls silent."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from pipelinerl.membership.lease import LauncherNote, Lease
from pipelinerl.membership.stores import FolderStore

FAKES = Path(__file__).with_name("launcher_fakes.py")
SECRET = "a-secret-that-both-nodes-share"
DEADLINE_S = 200.0
NODE_TIMEOUT_S = 60.0
"""Longer than a launcher on a loaded machine gets no CPU."""
needs_redis = pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")
STORES = ["files", pytest.param("redis", marks=needs_redis)]


def host(rank: int) -> str:
    """The node's own address. Redis listens on it besides 127.0.0.1."""
    return f"127.0.0.{rank + 2}"


class Nodes:
    """Launchers on loopback addresses, with a shared run folder."""

    def __init__(self, folder: Path):
        self.folder, self.num_nodes = folder, 2
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        """The newest of each rank."""
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, rank: int, *arguments: str, secret: str = SECRET, **behaviours: str) -> subprocess.Popen[bytes]:
        variables = {"WORLD_SIZE": str(self.num_nodes), "RANK": str(rank), "PIPELINERL_SECRET": secret}
        variables |= {f"FAKE_{kind.upper()}": value for kind, value in behaviours.items()}
        hosts = ",".join(host(node) for node in range(self.num_nodes))
        command = [
            *(sys.executable, str(FAKES), "launch", "--config-name=quickstart"),
            f"output_dir={self.run}",
            f"model_path={self.folder / 'model'}",
            "tiny_model=null",
            "finetune.max_train_steps=3",
            f"world.hosts=[{hosts}]",
            "world.cpu_slots=1",
            f"world.actor_fraction={self.num_nodes - 1}",
            "world.finetune_fraction=1",
            f"world.run_id={self.folder}",
            f"launcher.node_timeout_s={NODE_TIMEOUT_S}",
            "launcher.startup_timeout_s=190",
            *arguments,
        ]
        with open(self.folder / f"{rank}.out", "w") as output:
            self.processes[rank] = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | variables
            )
        return self.processes[rank]

    def start_all(self, *arguments: str, **behaviours: str) -> None:
        for rank in range(self.num_nodes):
            self.start(rank, *arguments, **behaviours)

    def output(self, rank: int) -> str:
        return (self.folder / f"{rank}.out").read_text()

    def outputs(self) -> str:
        return "\n".join(f"node {rank}:\n{self.output(rank)}" for rank in self.processes)

    def wait(self) -> list[int]:
        try:
            return [self.processes[rank].wait(timeout=DEADLINE_S) for rank in sorted(self.processes)]
        except subprocess.TimeoutExpired:
            raise AssertionError(self.outputs()) from None

    def wait_for(self, rank: int, text: str) -> None:
        self.wait_until(lambda: text in self.output(rank), repr(text))

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.outputs()}"
            time.sleep(0.05)

    def has_started(self, job: str) -> bool:
        started = self.run / "environment.jsonl"
        return started.exists() and f'"job": "{job}"' in started.read_text()

    def lose(self, rank: int, number: signal.Signals) -> None:
        """Ends or stops a launcher. Its silence counts as its loss after a second from now on, and no stall before."""
        process = self.processes[rank]
        process.send_signal(number)
        gone = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        self.wait_until(lambda: psutil.Process(process.pid).status() in gone, "the signal")
        store = FolderStore(self.run)
        lease = store.leases()[f"launcher_{rank}"]
        assert lease.ttl_s == NODE_TIMEOUT_S
        store.overwrite(msgspec.structs.replace(lease, sequence=lease.sequence + 1, ttl_s=1.0))

    def let_end(self) -> None:
        """Let trainers with the behaviour `held` go on."""
        (self.run / "may_end").touch()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    launchers = Nodes(tmp_path)
    yield launchers
    for process in launchers.processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
    for process in launchers.processes.values():
        process.wait(DEADLINE_S)


@pytest.mark.parametrize("streams", [pytest.param("files", marks=pytest.mark.slow), STORES[1]])
def test_nodes_run_together_to_the_end(nodes: Nodes, streams: str) -> None:
    nodes.start_all(f"streams={streams}")
    assert nodes.wait() == [0, 0], nodes.outputs()
    assert "node 1 (127.0.0.3) is here" in nodes.output(0)
    assert "step 3/3" in nodes.output(0)
    assert "0.250 → 0.750" in nodes.output(0)
    assert "step 3/3" not in nodes.output(1)
    assert (nodes.run / "summary.json").exists()
    assert not list(nodes.run.glob(".launch-*"))
    if streams == "files":
        notes = {name: lease.launcher for name, lease in FolderStore(nodes.run).leases().items() if lease.launcher}
        assert {name: note.ending for name, note in notes.items()} == {"launcher_0": "done", "launcher_1": "done"}
        nodes.start_all(f"streams={streams}")
        assert nodes.wait() == [0, 0], nodes.outputs()
        assert "the run is finished" in nodes.output(1)


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        (0, signal.SIGSTOP),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((0, signal.SIGKILL), (1, signal.SIGSTOP), (1, signal.SIGKILL))
        ],
    ],
)
def test_nodes_loss_is_seen_by_the_other_in_time(nodes: Nodes, victim: int, number: signal.Signals) -> None:
    nodes.start_all(finetune="endless")
    nodes.wait_for(0, "evaluation of version 0")
    nodes.wait_for(0, "is here")
    nodes.lose(victim, number)
    other = 1 - victim
    assert nodes.processes[other].wait(timeout=DEADLINE_S) == 1
    told = f"node {victim} ({host(victim)}) has been silent for {NODE_TIMEOUT_S:g} s (launcher.node_timeout_s)"
    assert f"the run failed: {told}" in nodes.output(other)


def test_nodes_resume_after_a_crash_whoever_comes_first(nodes: Nodes) -> None:
    """What crashed launchers have left in the run folder is believed by nobody."""
    note = LauncherNote(digest="of another command", secret_mark="of another secret", ending=None)
    for rank in range(2):
        stale = Lease(name=f"launcher_{rank}", incarnation="old", sequence=9, ttl_s=6.0, launcher=note)
        FolderStore(nodes.run).overwrite(stale)
    nodes.start(1)
    nodes.wait_for(1, "waiting for the launcher of node 0 (127.0.0.2)")
    nodes.start(0)
    assert nodes.wait() == [0, 0], nodes.outputs()


@pytest.mark.parametrize(
    ("asked", "streams"),
    [
        pytest.param(1, "redis", marks=needs_redis),
        pytest.param(0, "redis", marks=[needs_redis, pytest.mark.slow]),
        *[pytest.param(rank, "files", marks=pytest.mark.slow) for rank in (0, 1)],
    ],
)
def test_nodes_stop_request_ends_all(nodes: Nodes, asked: int, streams: str) -> None:
    nodes.start_all(f"streams={streams}", finetune="endless")
    nodes.wait_for(0, "evaluation of version 0")
    nodes.wait_for(0, "is here")
    nodes.processes[asked].send_signal(signal.SIGINT)
    assert nodes.wait() == [130, 130], nodes.outputs()


def test_nodes_failure_on_one_is_told_by_all(nodes: Nodes) -> None:
    nodes.start_all("launcher.max_restarts=0", finetune="crash")
    assert nodes.wait() == [1, 1]
    for rank in (0, 1):
        assert "finetune_0 failed: exit code 1" in nodes.output(rank)
        assert "RuntimeError: this role is broken" in nodes.output(rank)


@pytest.mark.slow
def test_nodes_with_different_configurations_end_at_once(nodes: Nodes) -> None:
    nodes.start(0, finetune="endless")
    nodes.start(1, "finetune.learning_rate=0.5")
    assert nodes.wait() == [1, 2]
    for rank in (0, 1):
        assert "node 1 (127.0.0.3) was started with another configuration or world" in nodes.output(rank)


@pytest.mark.slow
@pytest.mark.parametrize("streams", STORES)
def test_nodes_stranger_is_turned_away_and_the_run_waits(nodes: Nodes, streams: str) -> None:
    nodes.start(0, f"streams={streams}", finetune="held")
    stranger = nodes.start(1, f"streams={streams}", secret="another-secret-of-some-length", finetune="held")
    assert stranger.wait(timeout=DEADLINE_S) == 2
    assert "is PIPELINERL_SECRET the same on all nodes?" in nodes.output(1)
    nodes.start(1, f"streams={streams}", finetune="held")
    nodes.wait_for(0, "is here")
    nodes.let_end()
    assert nodes.wait() == [0, 0], nodes.outputs()


@pytest.mark.slow
def test_nodes_second_launcher_with_one_rank_is_refused(nodes: Nodes) -> None:
    nodes.start_all(finetune="held")
    nodes.wait_for(0, "is here")
    first = nodes.processes[1]
    second = nodes.start(1, finetune="held")
    assert second.wait(timeout=DEADLINE_S) == 2
    assert "another launcher with RANK=1 is running" in nodes.output(1)
    nodes.let_end()
    assert [process.wait(timeout=DEADLINE_S) for process in (nodes.processes[0], first)] == [0, 0]


def test_nodes_without_a_secret_are_refused(nodes: Nodes) -> None:
    nodes.start(0, secret="short")
    assert nodes.wait() == [2]
    assert "PIPELINERL_SECRET is not set" in nodes.output(0)


@pytest.mark.slow
def test_nodes_with_streams_in_files_share_the_folder_whatever_else_they_see_in_it(nodes: Nodes) -> None:
    """The follower read the leader's lease in the folder, but did not see the marker yet, and was refused its lock."""
    nodes.start(0, finetune="held")
    nodes.wait_until(lambda: (nodes.run / "members" / "launcher_0.json").exists(), "the leader's lease")
    for marker in nodes.run.glob(".launch-*"):
        marker.unlink()
    nodes.start(1, finetune="held")
    nodes.wait_for(0, "is here")
    nodes.let_end()
    assert nodes.wait() == [0, 0], nodes.outputs()


@pytest.mark.slow
@needs_redis
def test_nodes_error_of_a_launcher_is_told_to_the_leader_at_once(nodes: Nodes) -> None:
    """The follower takes the folder for its own. The leader only heard that it was silent."""
    nodes.start(0, "streams=redis", finetune="held")
    nodes.wait_until(lambda: list(nodes.run.glob(".launch-*")) != [], "the marker")
    for marker in nodes.run.glob(".launch-*"):
        marker.unlink()
    nodes.start(1, "streams=redis", finetune="held")
    assert nodes.wait() == [1, 2], nodes.outputs()
    assert "another launcher is running in it" in nodes.output(0)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_nodes_that_never_come_are_named(nodes: Nodes, rank: int) -> None:
    nodes.start(rank, "launcher.startup_timeout_s=3", finetune="endless")
    assert nodes.wait() == [1 + rank]
    missing = ["no launcher from 127.0.0.3", "node 0 (127.0.0.2) did not start the run"][rank]
    assert f"{missing} within launcher.startup_timeout_s=3 s" in nodes.output(rank)
    assert "share the run folder or have streams=redis" in nodes.output(rank)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nodes_run_goes_on_without_servers_and_takes_them_back(nodes: Nodes, number: signal.Signals) -> None:
    nodes.num_nodes = 3
    nodes.start_all(finetune="held")
    for rank in (1, 2):
        nodes.wait_for(0, f"node {rank} ({host(rank)}) is here")
    nodes.wait_until(lambda: nodes.has_started("actor_llm_1"), "the server")
    if number == signal.SIGKILL:
        nodes.lose(1, number)
    else:
        nodes.processes[1].send_signal(number)
    assert nodes.processes[1].wait(timeout=DEADLINE_S) == (-9 if number == signal.SIGKILL else 143)
    nodes.wait_for(0, "the run goes on without actor_llm_1, and the same command there brings it back")
    nodes.start(1, finetune="held")
    nodes.wait_for(0, "node 1 (127.0.0.3) is back")
    nodes.let_end()
    assert nodes.wait() == [0, 0, 0], nodes.outputs()


@pytest.mark.slow
def test_nodes_with_a_trainer_end_all_when_they_are_lost(nodes: Nodes) -> None:
    nodes.num_nodes = 3
    nodes.start_all(finetune="held")
    nodes.wait_for(0, "node 2 (127.0.0.4) is here")
    nodes.lose(2, signal.SIGKILL)
    assert nodes.wait() == [1, 1, -9], nodes.outputs()
    assert all("node 2 (127.0.0.4) has been silent" in nodes.output(rank) for rank in (0, 1))


@pytest.mark.slow
@needs_redis
def test_nodes_go_on_when_redis_is_killed_and_started_again(nodes: Nodes) -> None:
    nodes.start_all("streams=redis", finetune="held")
    nodes.wait_for(0, "is here")
    for process in psutil.Process(nodes.processes[0].pid).children(recursive=True):
        if process.name() == "redis-server":
            process.kill()
    nodes.wait_for(0, "redis_0: ")
    nodes.wait_until(lambda: (nodes.run / "redis_0" / "log.txt").read_text().count("Ready to accept") > 1, "redis")
    nodes.let_end()
    assert nodes.wait() == [0, 0], nodes.outputs()
