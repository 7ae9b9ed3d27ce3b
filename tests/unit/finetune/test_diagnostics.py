"""Diagnostics by hand, from ratios that no loss has clamped."""

import math
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.rl.diagnostics import LagInputs, StepDiagnostics, step_metrics
from pipelinerl.finetune.rl.losses import LossSettings, TokenInputs

RATIOS = [1.0, 2.0, 10.0, 0.5]
SEGMENTS = [0, 0, 2, 2]
LAGS, IN_FLIGHT = [0, 1, 3, 2], [0, 0, 1, 0]


@pytest.fixture
def metrics() -> dict[str, float]:
    log_mu = torch.full((4,), -2.0)
    inputs = TokenInputs(
        sampler_logprobs_K=log_mu,
        advantages_K=torch.ones(4),
        weights_K=torch.ones(4),
        segments_K=torch.tensor(SEGMENTS),
        num_segments=3,
    )
    batch = SimpleNamespace(
        inputs=inputs,
        lags=LagInputs(lag_K=torch.tensor(LAGS), in_flight_K=torch.tensor(IN_FLIGHT)),
        segment_rewards_S=torch.tensor([1.0, 99.0, 0.0]),
        num_tokens=9,
        input_ids=torch.zeros(3, 4),
    )
    output = PolicyOutput(
        loss=torch.tensor(0.25),
        logprobs_K=log_mu + torch.tensor(RATIOS).log(),
        entropy_K=torch.tensor([1.0, 2.0, 3.0, 2.0]),
        value_loss=torch.tensor(0.0),
        advantages_K=torch.ones(4),
    )
    diagnostics = StepDiagnostics(torch.device("cpu"))
    diagnostics.add(output, batch, LossSettings(ratio_clamp=5.0))
    return step_metrics(diagnostics.reduce(distributed=False))


def test_ess_per_token_and_per_sequence(metrics: dict[str, float]) -> None:
    assert metrics["ess"] == pytest.approx(13.5**2 / (4 * (1 + 4 + 100 + 0.25)), rel=1e-6)
    assert metrics["ess_sequence"] == pytest.approx((2 + 5) ** 2 / (2 * (4 + 25)), rel=1e-6)
    assert metrics["sequences"] == 2


def test_divergences(metrics: dict[str, float]) -> None:
    logs = [math.log(r) for r in RATIOS]
    assert metrics["kl_k1"] == pytest.approx(-sum(logs) / 4, rel=1e-5)
    assert metrics["kl_k3"] == pytest.approx(sum(r - x - 1 for r, x in zip(RATIOS, logs, strict=True)) / 4, rel=1e-5)
    assert metrics["chi_squared"] == pytest.approx(105.25 / 4 - 1, rel=1e-5)
    assert metrics["logratio_abs_mean"] == pytest.approx(sum(map(abs, logs)) / 4, rel=1e-5)
    assert metrics["logratio_abs_max"] == pytest.approx(math.log(10), rel=1e-5)
    assert metrics["clip_fraction"] == 0.25


def test_lag_and_its_parts(metrics: dict[str, float]) -> None:
    assert (metrics["lag_min"], metrics["lag_mean"], metrics["lag_max"]) == (0, 1.5, 3)
    assert metrics["lag_in_flight_mean"] == 0.25
    assert metrics["lag_queued_mean"] == 1.25
    assert metrics["lag0_fraction"] == 0.25
    assert metrics["logratio_abs_max_lag0"] == 0.0


def test_rewards_entropy_and_padding(metrics: dict[str, float]) -> None:
    assert metrics["reward"] == 0.5
    assert metrics["entropy"] == 2.0
    assert metrics["padding_fraction"] == 0.25


def test_nothing_trained_gives_finite_metrics() -> None:
    metrics = step_metrics(StepDiagnostics(torch.device("cpu")).reduce(distributed=False))
    assert all(math.isfinite(value) for value in metrics.values())
