"""The scaling fit recovers known curves and knows its error."""

import numpy as np
import pytest

from benchmarks.plan_scaling import fit_scaling

COMPUTE = np.geomspace(10, 10_000, 20)


def curve(asymptote=0.61, midpoint=400.0, exponent=1.3, start=0.2):
    return start + (asymptote - start) / (1 + (midpoint / COMPUTE) ** exponent)


def test_exact_curve_is_recovered():
    fit = fit_scaling(COMPUTE, curve(), start=0.2)
    assert fit.asymptote == pytest.approx(0.61, abs=1e-3)
    assert fit.exponent == pytest.approx(1.3, rel=0.01)
    assert fit.midpoint == pytest.approx(400, rel=0.01)
    assert fit.asymptote_error < 1e-3
    assert fit.predict(COMPUTE) == pytest.approx(curve(), abs=1e-3)


def test_error_of_the_asymptote_is_that_of_repeated_noise():
    fits = [
        fit_scaling(COMPUTE, curve() + np.random.default_rng(seed).normal(0, 0.01, len(COMPUTE)), start=0.2)
        for seed in range(6)
    ]
    errors = [abs(fit.asymptote - 0.61) for fit in fits]
    claimed = np.median([fit.asymptote_error for fit in fits])
    assert max(errors) < 4 * claimed
    assert claimed < 4 * (np.median(errors) + 1e-3)


def test_asymptote_is_not_claimed_from_the_early_part_alone():
    early = COMPUTE < 150
    rng = np.random.default_rng(1)
    fit = fit_scaling(COMPUTE[early], curve()[early] + rng.normal(0, 0.01, early.sum()), start=0.2)
    assert fit.asymptote_error > 0.1


def test_first_reward_is_the_start_when_none_is_given():
    assert fit_scaling(COMPUTE, curve()).start == pytest.approx(curve()[0])


@pytest.mark.parametrize(
    ("compute", "reward", "message"),
    [([1, 2, 3], [0.1, 0.2, 0.3], "at least 5"), ([1, 2, 3, 4, 5], [0.5, 0.4, 0.3, 0.2, 0.1], "do not rise")],
)
def test_data_without_a_curve_are_refused(compute, reward, message):
    with pytest.raises(ValueError, match=message):
        fit_scaling(compute, reward)
