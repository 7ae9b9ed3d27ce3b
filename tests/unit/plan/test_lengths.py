"""Length distributions: shares alive, moments, and where they come from."""

import numpy as np
import pytest

from pipelinerl.plan.lengths import Lengths


def test_uniform_lengths_by_hand():
    lengths = Lengths.uniform(4)
    assert lengths.alive.tolist() == [1.0, 0.75, 0.5, 0.25]
    assert (lengths.mean, lengths.longest, lengths.mean_square) == (2.5, 4, 7.5)
    # a sequence met at random has 4, 3, 2, 1 tokens left with weights 1·¼ … : alive (10, 6, 3, 1)/10
    assert lengths.residual_alive == pytest.approx([1.0, 0.6, 0.3, 0.1])


def test_lognormal_has_the_asked_mean_after_the_cut():
    lengths = Lengths.lognormal(1000, 4096)
    assert lengths.mean == pytest.approx(1000, rel=1e-6)
    assert lengths.longest == 4096
    assert lengths.probabilities[-1] > lengths.probabilities[-2]


def test_samples_follow_the_distribution():
    lengths = Lengths.uniform(10)
    assert lengths.sample(np.random.default_rng(0), 20000).mean() == pytest.approx(5.5, abs=0.1)


@pytest.mark.parametrize("probabilities", [[], [0.0], [0.5, -0.5]])
def test_nonsense_is_refused(probabilities):
    with pytest.raises(ValueError, match="lengths need"):
        Lengths(np.array(probabilities))


def test_impossible_mean_is_refused():
    with pytest.raises(ValueError, match="mean length 5000"):
        Lengths.lognormal(5000, 4096)
