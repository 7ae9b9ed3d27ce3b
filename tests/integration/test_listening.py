"""Which ports a real run of one node opens, and what they answer to another user of the machine."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.observability.metrics import read_metrics
from tests.listening import heard_by_a_stranger, listening

RUN_TIMEOUT_S = 900


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_one_node_listens_on_loopback_and_gives_no_control_away(tmp_path: Path):
    run_dir = tmp_path / "run"
    world = ["world.cpu_slots=4", "world.finetune_fraction=2", "world.actor_fraction=1", "streams=redis"]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart_ranks", f"output_dir={run_dir}"]
    with open(tmp_path / "output", "wb") as output:
        launcher = subprocess.Popen([*command, *world, "finetune.max_train_steps=60"], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(read_metrics(run_dir, "finetune")) < 2:
            assert launcher.poll() is None, (tmp_path / "output").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        found = listening(run_dir, [launcher.pid])
        print({f"{address}:{port}": role for (address, port), role in found.items()})
        assert {address for address, _ in found} == {"127.0.0.1"}, found
        assert {role.rpartition("_")[0] for role in found.values()} >= {"actor_llm", "redis", "finetune"}
        for port, answers in heard_by_a_stranger("127.0.0.1", [port for _, port in found]).items():
            print(found["127.0.0.1", port], port, answers)
            status = {path: said.split(" ")[1:2] for path, said in answers.items() if not said.startswith("PRLW1")}
            assert status.get("/pause", []) in ([], ["401"], ["404"]), answers
            assert status.get("large /tokenize", []) in ([], ["413"], ["404"]), answers
            assert answers["redis"] in ("", "-NOAUTH Authentication required.") or answers["redis"].startswith(
                ("HTTP/1.1 400", "PRLW1")
            ), answers
        assert launcher.wait(RUN_TIMEOUT_S) == 0, (tmp_path / "output").read_text()[-3000:]
    finally:
        launcher.terminate()
        launcher.wait()
