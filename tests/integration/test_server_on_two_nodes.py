"""A real vLLM server on two nodes, tensor parallel: every worker takes its weights, and the nodes end together."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.membership.stores import FolderStore
from tests.integration.test_server import Trainer, error_of, generate, versions_of
from tests.ports import free_port
from tests.sender_kit import Senders

START_S = 600.0
TOLERANCE = 5e-5
"""Sums over two workers are added in another order."""
OVERRIDES = ("++vllm_config.vllm_kwargs.tensor-parallel-size=2", "launcher.lease_ttl_s=10")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_S)]


class Nodes:
    """The roles of one server: node 0, whose job is in the world, and a part that joins."""

    def __init__(self, run_dir: Path, job: Any, cores: tuple[int, ...]):
        self.run_dir, self.job, self.secret = run_dir, job, secrets.token_hex(16)
        meet = ["--nodes", "2", "--meet", f"127.0.0.1:{free_port()}"]
        self.part = self._start("part", "--job", "actor_llm", "--node", "1", *meet, core=cores[1])
        self.process = self._start("server", "--job", job.name, *meet, core=cores[0])

    def log(self, name: str = "server") -> str:
        return (self.run_dir / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, *arguments: str, core: int) -> "subprocess.Popen[bytes]":
        command = ["taskset", "-c", str(core), sys.executable, "-m", "pipelinerl.inference"]
        with open(self.run_dir / f"{name}.log", "wb") as output:
            return subprocess.Popen(
                [*command, "--run", str(self.run_dir), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PIPELINERL_SECRET": self.secret},
            )


@pytest.fixture
def nodes(tmp_path: Path, tiny_qwen2: Path, serving: SimpleNamespace) -> Iterator[Nodes]:
    with serving.own_cores(2) as cores:
        nodes = Nodes(tmp_path, serving.write_run(tmp_path, tiny_qwen2, cores[:1], overrides=OVERRIDES), cores)
        try:
            for process, name in ((nodes.process, "server"), (nodes.part, "part")):
                assert process.poll() is None, nodes.log(name)[-4000:]
            yield nodes
        finally:
            for process in (nodes.process, nodes.part):
                process.terminate()
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def test_update_reaches_every_worker_and_the_nodes_end_together(
    nodes: Nodes, tiny_qwen2: Path, serving: SimpleNamespace
) -> None:
    store = FolderStore(nodes.run_dir)

    def states() -> dict[str, str]:
        for process, name in ((nodes.process, "server"), (nodes.part, "part")):
            assert process.poll() is None, nodes.log(name)[-4000:]
        return {name: lease.state for name, lease in store.leases().items()}

    up = {"actor_llm_0": "ready", "actor_llm_part_0": "ready"}
    serving.wait_for(lambda: states() == up, START_S, lambda: nodes.log()[-3000:] + nodes.log("part")[-3000:])
    trainer, senders = Trainer(tiny_qwen2), Senders(nodes, timeout_s=60, secret=nodes.secret)
    try:
        for version in (1, 2):
            trainer.next_version(version)
            trainer.send(senders, version)
            (choice,) = generate(nodes.job.url, max_tokens=60)
            assert versions_of(choice) == [version]
            assert error_of(trainer, choice) <= TOLERANCE
    finally:
        senders.sender.close()
    nodes.part.kill()
    nodes.part.wait()
    assert nodes.process.wait(60) != 0
    assert "event=part_lost" in nodes.log() or "died" in nodes.log(), nodes.log()[-3000:]
