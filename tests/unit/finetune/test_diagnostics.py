"""Diagnostics by hand, from ratios that no loss has clamped."""

import math
from types import SimpleNamespace

import pytest
import torch

from pipelinerl.finetune.diagnostics import StepDiagnostics, clip_warning, step_metrics
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.finetune.rl.tokens import LagInputs, TokenInputs
from pipelinerl.observability.catalogue import TrainerMetric, undeclared

RATIOS = [1.0, 2.0, 10.0, 0.5]
SEGMENTS = [0, 0, 2, 2]
LAGS, IN_FLIGHT = [0, 1, 3, 2], [0, 0, 1, 0]


def one_step(
    ratios: list[float],
    segments: list[int],
    lags: list[int],
    in_flight: list[int],
    entropy: list[float] | None = None,
    teacher_logprobs_K: torch.Tensor | None = None,
) -> dict[str, float]:
    """The metrics of a step of one micro-batch."""
    count = len(ratios)
    log_mu = torch.full((count,), -2.0)
    num_segments = max(segments) + 1
    inputs = TokenInputs(
        sampler_logprobs_K=log_mu,
        advantages_K=torch.ones(count),
        weights_K=torch.ones(count),
        segments_K=torch.tensor(segments),
        num_segments=num_segments,
        teacher_logprobs_K=teacher_logprobs_K,
    )
    batch = SimpleNamespace(
        inputs=inputs,
        lags=LagInputs(lag_K=torch.tensor(lags), in_flight_K=torch.tensor(in_flight)),
        segment_rewards_S=torch.tensor([1.0, 99.0, *[0.0] * num_segments])[:num_segments],
        num_tokens=9,
        num_shared=3,
        input_ids=torch.zeros(3, 4),
    )
    output = PolicyOutput(
        loss=torch.tensor(0.25),
        logprobs_K=log_mu + torch.tensor(ratios, dtype=torch.float64).log(),
        entropy_K=torch.tensor(entropy or [0.0] * count),
        value_loss=torch.tensor(0.0),
        inputs=inputs,
    )
    diagnostics = StepDiagnostics(torch.device("cpu"))
    diagnostics.add(output, batch, LossSettings(ratio_clamp=5.0))
    return step_metrics(diagnostics.reduce(distributed=False))


@pytest.fixture
def metrics() -> dict[str, float]:
    return one_step(RATIOS, SEGMENTS, LAGS, IN_FLIGHT, entropy=[1.0, 2.0, 3.0, 2.0])


def test_every_metric_is_declared(metrics: dict[str, float]) -> None:
    assert undeclared("finetune", metrics) == []


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


def test_teacher_of_whom_half_says_more_and_half_less_has_a_gap_and_no_divergence(metrics: dict[str, float]) -> None:
    """The policy's are −2 in four tokens; the teacher's −1.5, −2.25, −2.5, −1.75."""
    teacher = torch.tensor([-1.5, -2.25, -2.5, -1.75])
    taught = one_step([1.0] * 4, SEGMENTS, LAGS, IN_FLIGHT, teacher_logprobs_K=teacher)
    assert (taught["kl_teacher"], taught["teacher_gap"]) == (0.0, 0.375)
    assert undeclared("finetune", taught) == []
    assert not {"kl_teacher", "teacher_gap"} & metrics.keys()


def test_lag_is_the_sum_of_lag_in_flight_and_lag_in_the_queue(metrics: dict[str, float]) -> None:
    assert (metrics["lag_min"], metrics["lag_mean"], metrics["lag_max"]) == (0, 1.5, 3)
    assert metrics["lag_in_flight_mean"] == 0.25
    assert metrics["lag_queued_mean"] == 1.25
    assert metrics["logratio_abs_max_lag0"] == 0.0


def test_lag_histogram_has_every_trained_token_once_in_each_part(metrics: dict[str, float]) -> None:
    """Lags 0, 1, 3, 2, of which 0, 0, 1, 0 in flight: 0, 1, 2, 2 queued."""
    bins = ("0", "1", "2", "3-4", "5-8", "9-16", "17+")
    found = {
        part: [metrics[f"lag_histogram/{part}/{name}"] for name in bins] for part in ("trained", "in_flight", "queued")
    }
    assert found == {
        "trained": [0.25, 0.25, 0.25, 0.25, 0, 0, 0],
        "in_flight": [0.75, 0.25, 0, 0, 0, 0, 0],
        "queued": [0.25, 0.25, 0.5, 0, 0, 0, 0],
    }


def test_lag_histogram_bins_end_where_their_names_say() -> None:
    lags = [0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 400]
    metrics = one_step([1.0] * len(lags), list(range(len(lags))), lags, [0] * len(lags))
    counts = [round(11 * value) for name, value in metrics.items() if name.startswith("lag_histogram/trained/")]
    assert counts == [1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("log_ratio", [-800.0, 800.0])
def test_ess_of_sequences_whose_ratios_are_no_numbers(log_ratio: float) -> None:
    """Two sequences with ratios e^x and 2·e^x: (1 + 2)² / (2·(1 + 4)), whatever x is."""
    tokens = [math.exp(log_ratio / 4)] * 4
    metrics = one_step([*tokens, *tokens, 2.0], [0] * 4 + [1] * 5, [0] * 9, [0] * 9)
    assert metrics["ess_sequence"] == pytest.approx(0.9, rel=1e-4)


def test_rewards_entropy_and_padding(metrics: dict[str, float]) -> None:
    assert metrics["reward"] == 0.5
    assert metrics["entropy"] == 2.0
    assert metrics["shared_tokens"] == 3.0
    assert metrics["padding_fraction"] == 0.5


def test_nothing_trained_gives_finite_metrics() -> None:
    metrics = step_metrics(StepDiagnostics(torch.device("cpu")).reduce(distributed=False))
    assert all(math.isfinite(value) for value in metrics.values())


def test_clip_that_acts_on_fresh_tokens_warns_with_the_cure() -> None:
    """Lags 0, 0, 1, 1 and ratios 10, 1, 10, 10 against a clamp of 5: half of the fresh tokens are clipped."""
    metrics = one_step([10.0, 1.0, 10.0, 10.0], [0, 1, 2, 3], [0, 0, 1, 1], [0] * 4)
    assert (metrics["clip_fraction"], metrics["clip_fraction_lag0"]) == (0.75, 0.5)
    assert "50%" in (clip_warning(metrics) or "")
    assert "proximal_every" in (clip_warning(metrics) or "")


def test_clip_that_acts_on_old_tokens_is_what_it_is_for() -> None:
    metrics = one_step([1.0, 1.0, 10.0, 10.0], [0, 1, 2, 3], [0, 0, 1, 1], [0] * 4)
    assert (metrics["clip_fraction"], metrics["clip_fraction_lag0"]) == (0.5, 0.0)
    assert clip_warning(metrics) is None


def test_lag0_numbers_leave_out_fresh_tokens_of_sequences_that_older_weights_began() -> None:
    """Sequence 0 has lags 1 and 0: its fresh token was sampled over the older version's KV cache."""
    metrics = one_step([1.0, 10.0, 2.0], [0, 0, 1], [1, 0, 0], [1, 0, 0])
    assert metrics["logratio_abs_max_lag0"] == pytest.approx(math.log(2), rel=1e-5)
    assert metrics["clip_fraction_lag0"] == 0.0


@pytest.mark.parametrize(("share", "warns"), [(0.09, False), (0.11, True)])
def test_clip_warns_from_a_tenth_of_the_fresh_tokens_on(share: float, warns: bool) -> None:
    assert (clip_warning({TrainerMetric.CLIP_FRACTION_LAG0: share}) is not None) is warns
