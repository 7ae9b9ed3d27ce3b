"""`actor.llm_max_rollouts=auto` with a real vLLM: the server's lease follows its cache, and the quickstart learns."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.config.servers import FIRST_ROLLOUTS
from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.membership.stores import FolderStore

RUN_TIMEOUT_S = 1200
BLOCKS = 64
"""Blocks of the KV cache. An answer of the quickstart needs one, so that about this many rollouts fit."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * RUN_TIMEOUT_S)]


def test_server_takes_what_its_cache_holds(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
    command += ["actor.llm_max_rollouts=auto", f"+vllm_config.vllm_kwargs.num-gpu-blocks-override={BLOCKS}"]
    command += ["wandb.mode=disabled"]
    taken: list[int] = []
    with open(tmp_path / "launcher.txt", "w") as output:
        launcher = subprocess.Popen(command, env=dict(os.environ), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while launcher.poll() is None:
            assert time.monotonic() < deadline, (tmp_path / "launcher.txt").read_text()[-4000:]
            lease = FolderStore(run_dir).leases().get("actor_llm_0")
            if lease is not None and lease.state == "ready" and lease.capacity not in taken[-1:]:
                taken.append(lease.capacity)
            time.sleep(0.2)
    finally:
        launcher.terminate()
        launcher.wait(120)
    assert launcher.returncode == 0, (tmp_path / "launcher.txt").read_text()[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    print(f"took {taken} rollouts; success {summary['success_before']:.3f} to {summary['success_after']:.3f}")
    assert taken[0] == FIRST_ROLLOUTS
    assert max(taken) > FIRST_ROLLOUTS
    assert max(taken) < 3 * BLOCKS  # vLLM would take 1,024
    assert summary["success_after"] >= 0.8
    assert read_ledger(run_dir).violations == ()
