"""vLLM servers join a run that is under way, by the run's address alone; one leaves as asked, one is killed."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import FolderStore
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess, topics
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend

START_TIMEOUT_S = 600
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_TIMEOUT_S)]


class Process:
    """A command of this test, with its output in a file."""

    def __init__(self, log: Path, *command: str, secret: str):
        self.log = log
        env = os.environ | {"PIPELINERL_SECRET": secret}
        with open(log, "w") as output:
            self.popen = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def end(self, number: signal.Signals) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(120)


def until(condition: Callable[[], bool], process: Process) -> float:
    """Monotonic time at which the condition became true."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert process.popen.poll() is None, process.log.read_text()[-4000:]
        assert time.monotonic() < deadline, process.log.read_text()[-4000:]
        time.sleep(0.05)
    return time.monotonic()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []
    secret = secrets.token_hex(16)

    def run(name: str, *command: str) -> Process:
        started.append(Process(tmp_path / f"{name}.txt", *command, secret=secret))
        return started[-1]

    yield run
    for process in reversed(started):
        process.end(signal.SIGTERM)


def test_servers_join_leave_and_die_during_a_run(tmp_path: Path, start: Callable[..., Process]) -> None:
    run_dir = tmp_path / "run"
    arguments = [f"output_dir={run_dir}", "finetune.max_train_steps=100000", "launcher.lease_ttl_s=15"]
    arguments += ["eval.at_start=false", "eval_every_n_versions=0", "finetune.learning_rate=1e-5"]
    launcher = start("launcher", sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", *arguments)
    store = FolderStore(run_dir)
    until(lambda: bool(store.leases()) and (run_dir / "metrics" / "finetune.jsonl").exists(), launcher)
    set_streams_backend("files")
    serving: set[str] = set()
    waited: list[float] = []
    with open_reader(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage, name=None) as news:

        def is_serving(name: str) -> bool:
            for _, message in news.read_all():
                if isinstance(message, WeightUpdateSuccess):
                    serving.clear()
                    serving.update(message.servers)
            return name in serving

        for turn in range(3):
            command = ("-m", "pipelinerl.inference", "--run", str(run_dir), "--job", "actor_llm")
            server = start(f"server{turn}", "taskset", "-c", "0", sys.executable, *command)
            name = ("actor_llm_1", "actor_llm_1", "actor_llm_2")[turn]  # a name is free again when its server has left
            ready = until(lambda: lease_state(store, name) == "ready", server)  # noqa: B023
            waited.append(until(lambda: is_serving(name), server) - ready)  # noqa: B023
            if turn == 1:
                server.end(signal.SIGKILL)
            else:
                store.ask_to_leave(name)
                assert server.popen.wait(120) == 3, server.log.read_text()[-4000:]
            until(lambda: not is_serving(name), launcher)  # noqa: B023
    print(f"from ready to serving: {', '.join(f'{seconds:.1f}' for seconds in waited)} s")
    assert launcher.end(signal.SIGTERM) == 128 + signal.SIGTERM
    ledger = read_ledger(run_dir)
    print(ledger.counts())
    assert ledger.violations == ()
    assert not [name for name in ledger.counts() if name.startswith("dropped/") and name != "dropped/lag"]
    assert sorted(waited)[1] < 10


def lease_state(store: FolderStore, name: str) -> str:
    lease: Lease | None = store.leases().get(name)
    return lease.state if lease else ""
