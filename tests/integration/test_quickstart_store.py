"""The quickstart with its weights through a store: the server fetches them by itself, and the run learns on them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger

RUN_TIMEOUT_S = 900
STEPS = 40


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_quickstart_trains_with_weights_from_a_store(tmp_path: Path) -> None:
    run_dir, store = tmp_path / "run", tmp_path / "store"
    given = [
        f"output_dir={run_dir}",
        "weights.backend=store",
        f"weights.store={store}",
        f"finetune.max_train_steps={STEPS}",
    ]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", *given]
    process = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["optimizer_steps"] == STEPS
    assert 5 < summary["weight_updates"] <= STEPS
    assert summary["lag_steps"]["mean"] <= 3 + 7 / 64, "max_lag_steps + (attempts - 1) / batch size"
    assert read_ledger(run_dir).violations == ()
    log = (run_dir / "actor_llm_0" / "log.txt").read_text()
    fetched = [line for line in log.splitlines() if "event=version_fetched" in line]
    assert len(fetched) == summary["weight_updates"] + 1
    assert f"version={STEPS} " in fetched[-1]
    assert "event=version_not_fetched" not in log
    assert len(list(store.glob("*.whole"))) <= 60
