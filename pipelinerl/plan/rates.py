"""Rates of decoding and training per device, in tokens/s: measured points, or assumed from model and GPU.

Assumed rates are a roofline with the efficiencies below. They are good enough for a first split. Replace them by
measured rates when there are some (``python -m pipelinerl.plan compare RUN``).
"""

from functools import partial

import msgspec
import numpy as np

from pipelinerl.plan.model_shape import ModelShape
from pipelinerl.plan.throughput import Utilisation
from pipelinerl.plan.training_memory import RUNTIME_BYTES

DECODE_BANDWIDTH_EFFICIENCY = 0.6
DECODE_COMPUTE_EFFICIENCY = 0.4
TRAIN_COMPUTE_EFFICIENCY = 0.35
TRAIN_FLOPS_PER_PARAMETER = 8
"""2 forward, 4 backward, and 2 for the second forward pass of gradient checkpointing."""
VLLM_SHARE = 0.9


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a GPU's data sheet."""

    flops: float
    """Dense 16-bit operations per second."""
    bandwidth: float
    """Bytes per second."""
    memory: float
    """Bytes."""


GPUS = {
    "A100": Gpu(flops=312e12, bandwidth=2.0e12, memory=80e9),
    "L40S": Gpu(flops=362e12, bandwidth=0.86e12, memory=48e9),
    "H100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9),
    "H200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9),
    "B200": Gpu(flops=2250e12, bandwidth=8.0e12, memory=180e9),
}


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one device that only decodes or only trains."""

    decode: Utilisation
    """tokens/s with h sequences at a time on the device."""
    train: float
    """tokens/s."""
    max_concurrency: int
    """Sequences per device that fit in memory, or the largest measured batch."""
    source: str


def measured_rates(decode_points: dict[float, float], train: float) -> Rates:
    """Interpolate measured rates linearly between the points and from the origin.

    Args:
        decode_points: tokens/s of decoding by sequences at a time, per device.
        train: tokens/s of training, per device.

    Raises:
        ValueError: there is no point, or a value is not positive.
    """
    if not decode_points or min(decode_points) <= 0 or min(*decode_points.values(), train) <= 0:
        raise ValueError(
            "measured rates must be positive: give at least one sequences:tokens_per_second and a train rate"
        )
    heights = np.array([0.0, *sorted(decode_points)])
    rates = np.array([0.0, *(decode_points[h] for h in sorted(decode_points))])

    def decode(h: np.ndarray | float) -> np.ndarray:
        return np.interp(h, heights, rates)

    return Rates(decode=decode, train=train, max_concurrency=int(heights[-1]), source="measured")


def assumed_rates(shape: ModelShape, gpu: Gpu, *, mean_context: float, devices_per_server: int = 1) -> Rates:
    """Roofline: a decoding step reads the weights and every sequence's cache, and computes 2 FLOP per parameter.

    Args:
        shape: sizes of the model.
        mean_context: mean tokens in a sequence's cache.
        devices_per_server: devices over which a server's weights are divided.

    Raises:
        ValueError: a server cannot hold the weights and one sequence.
    """
    weight_bytes = 2 * shape.parameters / devices_per_server
    cache_bytes = shape.kv_bytes_per_token() * mean_context
    free = VLLM_SHARE * gpu.memory - weight_bytes - RUNTIME_BYTES
    if free < cache_bytes:
        raise ValueError(
            f"a server of {devices_per_server} GPU(s) of {gpu.memory / 1e9:.0f} GB cannot hold "
            f"{shape.parameters / 1e9:.1f}B parameters and one sequence: use more GPUs per server (--gpus-per-llm)"
        )
    return Rates(
        decode=partial(decode_rate, shape, gpu, mean_context=mean_context, devices_per_server=devices_per_server),
        train=TRAIN_COMPUTE_EFFICIENCY * gpu.flops / (TRAIN_FLOPS_PER_PARAMETER * shape.active_parameters),
        max_concurrency=max(int(free / cache_bytes), 1),
        source="assumed",
    )


def decode_rate(
    shape: ModelShape, gpu: Gpu, sequences: np.ndarray | float, *, mean_context: float, devices_per_server: int = 1
) -> np.ndarray:
    """tokens/s of one device that decodes this number of sequences at a time."""
    h = np.asarray(sequences, dtype=np.float64)
    read_bytes = 2 * shape.parameters / devices_per_server + h * shape.kv_bytes_per_token() * mean_context
    reading = read_bytes / (DECODE_BANDWIDTH_EFFICIENCY * gpu.bandwidth)
    computing = 2 * shape.active_parameters * h / (DECODE_COMPUTE_EFFICIENCY * gpu.flops)
    return h / np.maximum(reading, computing)
