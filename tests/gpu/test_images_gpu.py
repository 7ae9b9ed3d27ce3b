"""Qwen2.5-VL through the launcher: its server needs torchvision, which the CPU environment lacks."""

import importlib.util
from pathlib import Path

import pytest

from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.observability.metrics import read_metrics
from tests.integration.test_images_run import OVERRIDES, STEPS
from tests.launches import run_experiment
from tests.vision import save_qwen2_5_vl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"),
]
ON_ONE_GPU = ("world.accelerator=cuda", "world.gpus_per_node=1", "world.share_devices=true", "weights.backend=ipc")


def test_qwen2_5_vl_is_trained_on_what_its_server_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its images have positions of height and width on both sides."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    model, run_dir = save_qwen2_5_vl(tmp_path / "model"), tmp_path / "run"
    overrides = (*OVERRIDES, *ON_ONE_GPU, f"model_path={model}", "vllm_config.vllm_kwargs.gpu-memory-utilization=0.3")
    assert run_experiment("base", run_dir, *overrides, timeout_s=1000)["optimizer_steps"] == STEPS
    points = read_metrics(run_dir, "finetune")
    assert max(point.get(TrainerMetric.LOGRATIO_ABS_MAX_LAG0, 0.0) for point in points) <= 1e-3
