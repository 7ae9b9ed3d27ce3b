"""Verdicts over log-probabilities: figures by hand, faults found, healthy noise never."""

import numpy as np
import pytest

from pipelinerl.weights.verify.calibration import (
    Baseline,
    calibrate,
    check_version,
    mean_difference,
    statistic,
)

N = 1008


def test_statistic_is_the_root_mean_square_with_outliers_clipped_at_eight_noise_deviations() -> None:
    assert statistic(np.array([3.0, -4.0]), noise=1.0) == pytest.approx(np.sqrt(12.5))
    assert statistic(np.array([0.0, 100.0]), noise=1.0) == pytest.approx(np.sqrt(32.0))
    assert statistic(np.array([0.0, np.nan]), noise=1.0) == np.inf
    assert statistic(np.array([0.0, -np.inf]), noise=1.0) == np.inf


def test_calibration_takes_the_spread_as_noise_and_refuses_one_beyond_the_tolerance() -> None:
    offset = np.array([0.02, -0.02] * 50)
    baseline, verdict = calibrate(offset - 1.0, np.full(100, -1.0), tolerance=0.2)
    assert verdict.fault == ""
    assert baseline.noise == pytest.approx(0.02)
    np.testing.assert_allclose(baseline.offset, offset, atol=1e-12)
    _, verdict = calibrate(15 * offset - 1.0, np.full(100, -1.0), tolerance=0.2)
    assert "model's file" in verdict.fault
    assert (verdict.difference, verdict.limit) == (pytest.approx(0.3), 0.2)


def test_mean_difference_is_that_of_each_tokens_newest_version() -> None:
    """−0.02 and 0.04 nats at first: 0.03. Then the second token alone is scored, and differs by 0.06: 0.04."""
    trainer = np.array([-1.0, -1.0])
    baseline, _ = calibrate(np.array([-1.02, -0.96]), trainer, tolerance=0.2)
    assert mean_difference(baseline) == pytest.approx(0.03)
    later, verdict = check_version(baseline, np.array([9.0, -1.06]), trainer, np.array([False, True]))
    assert verdict.fault
    assert mean_difference(later) == pytest.approx(0.03)
    later, verdict = check_version(baseline, np.array([9.0, -0.94]), trainer, np.array([False, True]))
    assert not verdict.fault
    assert mean_difference(later) == pytest.approx(0.04)


def test_float32_servers_have_the_noise_floor() -> None:
    baseline, _ = calibrate(np.full(N, -1.0), np.full(N, -1.0), tolerance=2e-4)
    assert baseline.noise == 2e-4
    server = np.full(N, -1.0) + 1e-4
    assert check_version(baseline, server, np.full(N, -1.0))[1].fault == ""
    assert check_version(baseline, server + 1e-3, np.full(N, -1.0))[1].fault


def test_an_answer_that_is_not_finite_is_a_fault() -> None:
    baseline, _ = calibrate(np.zeros(4), np.zeros(4), tolerance=0.1)
    assert check_version(baseline, np.array([0.0, np.nan, 0.0, 0.0]), np.zeros(4))[1].fault
    assert calibrate(np.array([0.0, np.nan]), np.zeros(2), tolerance=0.1)[1].fault


class Model:
    """Two ends whose log-probabilities are the truth and their own noise, drawn anew for every version."""

    def __init__(self, seed: int, noise: float, tails: bool = False):
        self.rng, self.noise, self.tails = np.random.default_rng(seed), noise, tails
        self.truth = -self.rng.exponential(2.0, N)
        self.systematic = self.rng.normal(0.0, noise / 2, N)

    def baseline(self) -> Baseline:
        baseline, verdict = calibrate(self.server(self.truth), self.trainer(self.truth), tolerance=0.2)
        assert verdict.fault == ""
        return baseline

    def step(self, size: float) -> np.ndarray:
        return self.truth + size * self.rng.standard_normal(N)

    def trainer(self, truth: np.ndarray) -> np.ndarray:
        return truth + self._noise()

    def server(self, truth: np.ndarray) -> np.ndarray:
        return truth + self.systematic + self._noise()

    def _noise(self) -> np.ndarray:
        scale = self.noise / np.sqrt(2)
        return scale * (self.rng.standard_t(4, N) / np.sqrt(2) if self.tails else self.rng.standard_normal(N))


@pytest.mark.parametrize("noise", [1e-6, 0.016, 0.05])
@pytest.mark.parametrize("step", [0.0, 8e-4, 8e-3, 0.1])
def test_healthy_servers_pass_two_hundred_versions(noise: float, step: float) -> None:
    for seed in range(2):
        model = Model(seed, noise, tails=True)
        baseline = model.baseline()
        for _ in range(200):
            model.truth = model.step(step)
            baseline, verdict = check_version(baseline, model.server(model.truth), model.trainer(model.truth))
            assert verdict.fault == "", verdict


@pytest.mark.parametrize(("noise", "step"), [(1e-6, 1e-3), (0.016, 0.1), (0.05, 0.3)])
def test_one_sequence_of_four_per_version_decides_about_that_sequence(noise: float, step: float) -> None:
    """Healthy servers pass, a missed update is found, and each sequence is compared with its own last version."""
    for seed in range(10):
        model = Model(seed, noise, tails=True)
        baseline = model.baseline()
        for version in range(40):
            model.truth = model.step(step / 10)
            row = np.arange(N) // (N // 4) == version % 4
            server, trainer = model.server(model.truth), model.trainer(model.truth)
            unseen = np.where(row, server, np.nan)
            baseline, verdict = check_version(baseline, unseen, trainer, row)
            assert verdict.fault == "", verdict
            np.testing.assert_array_equal(baseline.trainer[row], trainer[row])
            assert (baseline.trainer[~row] != trainer[~row]).all()
        before, model.truth = model.truth, model.step(step)
        _, verdict = check_version(baseline, model.server(before), model.trainer(model.truth), row)
        assert verdict.fault


def test_noise_that_grows_threefold_in_two_hundred_versions_is_followed() -> None:
    model = Model(0, 0.016)
    baseline = model.baseline()
    for version in range(200):
        model.noise = 0.016 * (1 + version / 100)
        baseline, verdict = check_version(baseline, model.server(model.truth), model.trainer(model.truth))
        assert verdict.fault == ""
    assert baseline.noise == pytest.approx(0.048, rel=0.15)


@pytest.mark.parametrize(("noise", "step"), [(1e-6, 1e-3), (0.016, 0.03), (0.05, 0.09)])
def test_a_missed_update_is_found_when_the_step_is_twice_the_noise(noise: float, step: float) -> None:
    for seed in range(100):
        model = Model(seed, noise)
        baseline = model.baseline()
        before, model.truth = model.truth, model.step(step)
        _, verdict = check_version(baseline, model.server(before), model.trainer(model.truth))
        assert verdict.fault, verdict
        _, verdict = check_version(baseline, model.server(model.truth), model.trainer(model.truth))
        assert verdict.fault == ""
        assert verdict.followed is not None
        assert verdict.followed > 0.9


def test_a_step_far_below_the_noise_decides_nothing() -> None:
    model = Model(0, 0.05)
    baseline = model.baseline()
    _, verdict = check_version(baseline, model.server(model.truth), model.trainer(model.step(8e-4)))
    assert verdict.fault == ""
    assert verdict.followed is None


def test_a_fault_leaves_the_baseline_as_it_was_and_says_both_figures() -> None:
    model = Model(0, 0.02)
    baseline = model.baseline()
    after, verdict = check_version(baseline, model.server(model.step(1.0)), model.trainer(model.truth))
    assert after is baseline
    assert "not those of the weights" in verdict.fault
    assert verdict.limit == pytest.approx(3 * baseline.noise)
    assert verdict.difference > verdict.limit


def test_noise_follows_slowly_what_passes() -> None:
    """The residual is 0.02, of which 0.01 is the calibration's: √3 · 0.01 is the version's own, and counts a fifth."""
    zeros = np.zeros(4)
    baseline = Baseline(offset=zeros, calibrated=0.01, noise=0.01, tolerance=0.2, server=zeros, trainer=zeros)
    after, verdict = check_version(baseline, np.array([0.02, -0.02, 0.02, -0.02]), zeros)
    assert verdict.fault == ""
    assert after.noise == pytest.approx(0.8 * 0.01 + 0.2 * 3**0.5 * 0.01)
