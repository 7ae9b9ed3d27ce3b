"""`pipelinerl gpu-check --rehearse`: every check from end to end on the CPU, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN_TIMEOUT_S = 1500


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_every_check_runs_and_is_judged(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelinerl", "gpu-check", "--rehearse", f"--limit-s={RUN_TIMEOUT_S - 100}"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'found'}"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout == (tmp_path / "found.txt").read_text()
    assert len(done.stdout.splitlines()) <= 40
    assert "REHEARSAL" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    outcomes = {verdict["title"]: verdict["level"] for verdict in found["verdicts"]}
    assert outcomes == {
        "imports": "passed",
        "trainer, 128: speed": "noted",
        "trainer, 128: memory": "noted",
        "trainer, 256: speed": "noted",
        "trainer, 256: memory": "noted",
        "quickstart": "noted",
        "quickstart: swaps": "passed",
        "serving: swaps": "passed",
        "serving: pause": "noted",
        "serving: decoding": "noted",
        "serving: probe noise": "passed",
        "serving: device memory": "noted",
        "model runner V1": "noted",
        "model runner V1: swaps": "passed",
        "communicators": "not run",
    }
    assert found["facts"]["serving"]["steps"] == 20
    assert len(found["facts"]["serving"]["pauses_ms"]) >= 10
