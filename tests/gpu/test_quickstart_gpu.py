"""A whole run on one shared GPU: real vLLM, weights over CUDA IPC. Written without a GPU."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.observability.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ON_ONE_GPU = (
    *("world.accelerator=cuda", "world.gpus_per_node=1", "world.share_devices=true", "finetune.dtype=bfloat16"),
    *("vllm_config.vllm_kwargs.dtype=bfloat16", "vllm_config.vllm_kwargs.gpu-memory-utilization=0.3"),
    *("weights.backend=ipc", "weights.probe_tolerance=0.2", "finetune.max_train_steps=40"),
)


def test_quickstart_learns_on_one_shared_gpu(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
    done = subprocess.run([*command, *ON_ONE_GPU], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert max(point["step"] for point in read_metrics(run_dir, "finetune")) == 40
