"""The quickstart with two real servers and several trainer ranks, by engine: it learns as with one of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_reader
from tests.zero3 import shard_everything

RUN_TIMEOUT_S = 900
STEPS = 160


def engine_overrides(engine: str, folder: Path) -> list[str]:
    return {
        "zero2": ["deepspeed_config=deepspeed_stage2_bf16"],
        "zero3": [shard_everything(folder)],
        "fsdp2": ["use_deepspeed=false", "use_fsdp=true"],
    }[engine]


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_quickstart_learns_with_two_servers_and_several_ranks(engine: str, ranks: int, tmp_path: Path):
    run_dir = tmp_path / "run"
    world = [f"world.cpu_slots={2 + ranks}", f"world.finetune_fraction={ranks}"]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart_ranks", f"output_dir={run_dir}"]
    done = subprocess.run(
        [*command, *world, *engine_overrides(engine, tmp_path)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    name = "fsdp2" if engine == "fsdp2" else "deepspeed"
    assert f"engine={name} ranks={ranks}" in (run_dir / "finetune_0" / "log.txt").read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    print(f"success {summary['success_before']:.3f} → {summary['success_after']:.3f}")
    assert summary["success_before"] <= 0.40
    assert summary["success_after"] >= 0.68
    assert summary["optimizer_steps"] == STEPS
    assert summary["lag_steps"]["mean"] <= 3 + 7 / 64, "max_lag_steps + (attempts - 1) / batch size"
    assert read_ledger(run_dir).violations == ()
    with open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None) as reader:
        updates = [message for _, message in reader.read_all() if isinstance(message, WeightUpdateSuccess)]
    assert len({update.version for update in updates}) == summary["weight_updates"] + 1, "version 0 is no update"
    assert summary["weight_updates"] <= STEPS, "a version is skipped while servers still take the one before"
    assert (updates[-1].version, set(updates[-1].servers)) == (STEPS, {"actor_llm_0", "actor_llm_1"})
