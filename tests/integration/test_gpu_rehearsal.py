"""The GPU tests whose code does not need a GPU run on the CPU, so that a renamed function is found before the day."""

import os
import subprocess
import sys

import pytest

from tests.engine_runs import ROOT

WITHOUT_KERNELS = "rl_step or receiver or attention or (engines and ddp and not false)"


@pytest.mark.timeout(600)
def test_gpu_tests_run_on_the_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", WITHOUT_KERNELS]
    env = os.environ | {"PIPELINERL_GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "14 passed, 4 skipped" in done.stdout, done.stdout[-1000:]
