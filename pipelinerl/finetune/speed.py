"""How fast a step was: tokens per second and device, and the share of the device's peak that the model used (MFU)."""

from typing import Any

import torch

from pipelinerl.observability.catalogue import MetricName, TrainerMetric
from pipelinerl.plan.model_shape import shape_from_config
from pipelinerl.plan.speed import GPUS, TRAINED_FLOPS, find_gpu


def speed_metrics(
    config: Any, device: torch.device, tokens: float, seconds: float, ranks: int
) -> dict[MetricName, float]:
    """The metrics of a step, `mfu` only on a GPU whose peak is known.

    Args:
        config: of the model, as in transformers.
        tokens: computed for the optimizer batch, prompts included, over all ranks.
        seconds: of computation.
    """
    found: dict[MetricName, float] = {TrainerMetric.INPUT_TOKENS_PER_S_PER_DEVICE: tokens / seconds / ranks}
    peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    used = None if peak is None else mfu(config.to_dict(), found[TrainerMetric.INPUT_TOKENS_PER_S_PER_DEVICE], peak)
    return found if used is None else found | {TrainerMetric.MFU: used}


def peak_flops(name: str) -> float | None:
    """Dense 16-bit operations per second of the GPU that CUDA calls ``name``. None: unknown."""
    found = find_gpu(name)
    return None if found is None else GPUS[found].flops


def mfu(config: dict[str, Any], tokens_per_s: float, peak: float) -> float | None:
    """Model FLOPs utilisation (arXiv:2204.02311, appendix B) without attention. None: the model's sizes are unknown.

    Args:
        tokens_per_s: of one device.
        peak: operations per second of the device.
    """
    shape = shape_from_config(config)
    return None if shape is None else TRAINED_FLOPS * shape.active_parameters * tokens_per_s / peak
