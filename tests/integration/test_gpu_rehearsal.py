"""The GPU tests whose code does not need a GPU run on the CPU, so that a renamed function is found before the day."""

import os
import subprocess
import sys

import pytest

from tests.engine_runs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("rl_step or receiver or attention or transport", "13 passed, 5 skipped"),
        ("engines or swap", "14 passed, 3 skipped"),
    ],
)
def test_gpu_tests_run_on_the_cpu(chosen: str, expected: str) -> None:
    """The modules of those that are not chosen are imported, too."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", chosen, "-p", "no:cacheprovider"]
    env = os.environ | {"PIPELINERL_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert expected in done.stdout, done.stdout[-1000:]
