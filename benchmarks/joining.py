"""Seconds from ready to serving of servers that join a run: `python -m benchmarks.joining [--json joining.json]`.

A quickstart without end runs. vLLM servers join it by its address, one after the other: one leaves as asked, the next
takes its free name and is killed, the third comes back. A server is ready when its lease says so, and serves when the
trainer names it: then it has the current weights. The ledger says what became of every sample.
"""

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.membership.stores import FolderStore
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess, topics
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend

START_TIMEOUT_S = 900
END_TIMEOUT_S = 120
TURNS = (("actor_llm_1", False), ("actor_llm_1", True), ("actor_llm_2", False))
"""The name that each server in turn gets, and whether it is killed. A name is free again when its server has left."""
ENDLESS = (
    "finetune.max_train_steps=100000",
    "launcher.lease_ttl_s=15",
    "eval.at_start=false",
    "eval_every_n_versions=0",
    "finetune.learning_rate=1e-5",
)


class Process:
    """A command with its output in a file."""

    def __init__(self, log: Path, *command: str, secret: str):
        self.log = log
        env = os.environ | {"PIPELINERL_SECRET": secret}
        with open(log, "w") as output:
            self.popen = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def until(self, condition: Callable[[], bool]) -> float:
        """Monotonic time at which the condition became true. The process must live until then."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not condition():
            assert self.popen.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        return time.monotonic()

    def end(self, number: signal.Signals) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(number)
        return self.popen.wait(END_TIMEOUT_S)


class Join:
    """A run and the servers that join it.

    Args:
        folder: of the run and the logs.
    """

    def __init__(self, folder: Path):
        self._folder, self.run_dir, self._secret = folder, folder / "run", secrets.token_hex(16)
        self._store, self._started = FolderStore(self.run_dir), list[Process]()
        self._serving: set[str] = set()

    def measure(self) -> dict[str, Any]:
        """Let the servers of `TURNS` come and go. Returns the figures, and the violations that the ledger found."""
        launch = ("-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={self.run_dir}", *ENDLESS)
        try:
            launcher = self._start("launcher", sys.executable, *launch)
            metrics = self.run_dir / "metrics" / "finetune.jsonl"
            launcher.until(lambda: bool(self._store.leases()) and metrics.exists())
            set_streams_backend("files")
            with open_reader(SingleStreamSpec(self.run_dir, topics.TRAINER), TrainerMessage, name=None) as messages:
                seconds = [self._turn(messages, launcher, *turn) for turn in TURNS]
            assert launcher.end(signal.SIGTERM) == 128 + signal.SIGTERM
        finally:
            for process in reversed(self._started):
                process.end(signal.SIGTERM)
        ledger = read_ledger(self.run_dir)
        return {
            "ready_to_serving_s": [round(value, 2) for value in seconds],
            "median_s": round(statistics.median(seconds), 2),
            "samples": ledger.counts(),
            "violations": [str(violation) for violation in ledger.violations],
        }

    def _turn(self, messages: Any, launcher: Process, name: str, is_killed: bool) -> float:
        command = ("-m", "pipelinerl.inference", "--run", str(self.run_dir), "--job", "actor_llm")
        server = self._start(f"server{len(self._started)}", "taskset", "-c", "0", sys.executable, *command)
        ready = server.until(lambda: self._state(name) == "ready")
        seconds = server.until(lambda: name in self._named(messages)) - ready
        if is_killed:
            server.end(signal.SIGKILL)
        else:
            self._store.ask_to_leave(name)
            assert server.popen.wait(END_TIMEOUT_S) == 3, server.log.read_text()[-4000:]
        launcher.until(lambda: name not in self._named(messages))
        return seconds

    def _named(self, messages: Any) -> set[str]:
        """The servers that the trainer's newest message names."""
        for _, message in messages.read_all():
            if isinstance(message, WeightUpdateSuccess):
                self._serving = set(message.servers)
        return self._serving

    def _state(self, name: str) -> str:
        lease = self._store.leases().get(name)
        return lease.state if lease else ""

    def _start(self, name: str, *command: str) -> Process:
        self._started.append(Process(self._folder / f"{name}.txt", *command, secret=self._secret))
        return self._started[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="joining-") as folder:
        result = {"cores": os.cpu_count(), "load_before": round(load, 2), **Join(Path(folder)).measure()}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
