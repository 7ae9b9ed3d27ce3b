"""Rates per device: measured points and the roofline, by hand."""

import numpy as np
import pytest

from pipelinerl.config import load
from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape
from pipelinerl.plan.speed import (
    GPUS,
    PROMPT_TOKENS,
    Gpu,
    assumed_lengths,
    assumed_rates,
    decode_rate,
    measured_rates,
    server_speed,
    trainer_speed,
)


def make_config(*overrides: str):
    required = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]
    return load.parse(load.compose("base", [*required, *overrides]))


def test_measured_points_are_joined_by_lines_from_the_origin():
    rates = measured_rates({64: 3200.0, 8: 800.0}, train=1000.0)
    assert rates.decode(np.array([4, 8, 36, 64])) == pytest.approx([400, 800, 2000, 3200])
    assert (rates.max_concurrency, rates.train) == (64, 1000.0)


@pytest.mark.parametrize(("points", "train"), [({}, 1.0), ({8: -1.0}, 1.0), ({8: 10.0}, 0.0)])
def test_measured_rates_must_be_positive(points, train):
    with pytest.raises(ValueError, match="must be positive"):
        measured_rates(points, train)


def test_roofline_by_hand():
    # 992 parameters; 32 bytes of cache per token, 10 tokens of prompt and 3 of completion on average: 416 per sequence
    shape = ModelShape(layers=1, hidden=8, intermediate=16, heads=4, kv_heads=4, head_dim=2, vocab=25, tied=True)
    rates = assumed_rates(
        make_config(),
        shape,
        Gpu(flops=1e6, bandwidth=1e5, memory=10e9),
        Lengths.constant(5),
        prompt_tokens=10.0,
        ranks=1,
    )
    parameters = shape.parameters
    reading = (2 * parameters + 4 * 32 * 12.5) / 60000
    computing = 2 * parameters * 4 / 400000
    assert float(rates.decode(4)) == pytest.approx(4 / max(reading, computing))
    # forward, backward (twice), recomputed: 2 per parameter, and 2 × 2 × 2 for each of 4 heads and 7.5 keys
    assert rates.train == pytest.approx(0.35 * 1e6 / (4 * (2 * parameters + 4 * 8 * 7.5)))
    assert rates.source == "assumed"


def test_large_batches_of_short_sequences_are_limited_by_operations():
    """1,000 sequences of 10 tokens read little: each needs 2 operations per parameter at .4 of the peak."""
    shape, gpu = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], GPUS["H100"]
    rate = decode_rate(shape, gpu, 1000, context=10, ranks=1)
    assert float(rate) == pytest.approx(0.4 * gpu.flops / (2 * shape.active_parameters))


def test_steps_of_a_small_model_last_as_long_as_the_host_schedules():
    """A 0.5B model reads 1 GB in 0.3 ms, and 256 sequences take the host 6.9 ms: on two devices each decodes half."""
    shape, gpu = PUBLISHED_SHAPES["Qwen/Qwen2.5-0.5B"], GPUS["H200"]
    assert float(decode_rate(shape, gpu, 256, context=100, ranks=1)) == pytest.approx(256 / 6.9e-3)
    assert float(decode_rate(shape, gpu, 128, context=100, ranks=2)) == pytest.approx(128 / 6.9e-3)


def test_planner_and_dry_run_predict_the_same_rates():
    shape, gpu = PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], GPUS["H100"]
    cfg = make_config("finetune.gradient_checkpointing=true", "actor.llm_max_rollouts=64")
    rates = assumed_rates(cfg, shape, gpu, assumed_lengths(cfg), prompt_tokens=PROMPT_TOKENS, ranks=1)
    assert trainer_speed(cfg, shape, gpu, 1).tokens_per_s == rates.train
    assert server_speed(cfg, shape, gpu, 1, int(gpu.memory)).tokens_per_s == float(rates.decode(64))


def roofline(model: str, gpu: str):
    lengths = Lengths.lognormal(2000, 8000)
    return assumed_rates(make_config(), PUBLISHED_SHAPES[model], GPUS[gpu], lengths, prompt_tokens=500.0, ranks=1)


def test_more_sequences_never_slow_a_device_down():
    rates = roofline("Qwen/Qwen2.5-7B", "H100")
    assert (np.diff(rates.decode(np.arange(1, rates.max_concurrency))) >= -1e-6).all()


def test_model_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"32\.8B parameters.*--gpus-per-llm"):
        roofline("Qwen/Qwen2.5-32B", "L40S")
