"""Whole runs: an experiment started as people start it, which must end with exit code 0."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipelinerl.launcher.command_line import quoted


def run_experiment(name: str, run_dir: Path, *overrides: str, timeout_s: float) -> dict[str, Any]:
    """Launch the configuration ``name`` in ``run_dir`` and return the run's summary."""
    command = [sys.executable, "-m", "pipelinerl.launch", f"--config-name={name}", f"output_dir={quoted(str(run_dir))}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((run_dir / "summary.json").read_text())
