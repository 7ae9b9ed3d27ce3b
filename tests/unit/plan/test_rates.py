"""Rates per device: measured points and the roofline, by hand."""

import numpy as np
import pytest

from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape
from pipelinerl.plan.rates import GPUS, Gpu, assumed_rates, measured_rates


def test_measured_points_are_joined_by_lines_from_the_origin():
    rates = measured_rates({64: 3200.0, 8: 800.0}, train=1000.0)
    assert rates.decode(np.array([4, 8, 36, 64])) == pytest.approx([400, 800, 2000, 3200])
    assert (rates.max_concurrency, rates.train) == (64, 1000.0)


@pytest.mark.parametrize(("points", "train"), [({}, 1.0), ({8: -1.0}, 1.0), ({8: 10.0}, 0.0)])
def test_measured_rates_must_be_positive(points, train):
    with pytest.raises(ValueError, match="must be positive"):
        measured_rates(points, train)


def test_roofline_by_hand():
    # 1000 parameters in 2000 bytes; 32 bytes of cache per token, 10 tokens each: 320 bytes per sequence
    shape = ModelShape(layers=1, hidden=8, intermediate=16, heads=4, kv_heads=4, head_dim=2, vocab=25, tied=True)
    gpu = Gpu(flops=1e6, bandwidth=1e5, memory=10e9)
    rates = assumed_rates(shape, gpu, mean_context=10)
    parameters = shape.parameters
    reading = (2 * parameters + 4 * 320) / 60000
    computing = 2 * parameters * 4 / 400000
    assert float(rates.decode(4)) == pytest.approx(4 / max(reading, computing))
    assert rates.train == pytest.approx(0.35 * 1e6 / (8 * parameters))
    assert rates.source == "assumed"


def test_more_sequences_never_slow_a_device_down():
    rates = assumed_rates(PUBLISHED_SHAPES["Qwen/Qwen2.5-7B"], GPUS["H100"], mean_context=2000)
    assert (np.diff(rates.decode(np.arange(1, rates.max_concurrency))) >= -1e-6).all()


def test_model_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"32\.8B parameters.*--gpus-per-llm"):
        assumed_rates(PUBLISHED_SHAPES["Qwen/Qwen2.5-32B"], GPUS["L40S"], mean_context=2000)
