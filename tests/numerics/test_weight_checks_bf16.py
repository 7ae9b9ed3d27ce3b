"""Weight probes of a bfloat16 server of 24 layers with two workers. More in benchmarks/weight_checks.py."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from benchmarks.weight_checks import FAULTS, TOLERANCE, StandIn
from pipelinerl.weights.verify.calibration import calibrate, check_version


@pytest.fixture(scope="module")
def run() -> Iterator[StandIn]:
    """On one thread: its products are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield StandIn(logit_deviation=1.0)
    torch.set_num_threads(threads)


def test_healthy_server_whose_tokens_differ_by_more_than_the_old_bound_is_kept(run: StandIn) -> None:
    server, trainer = run.server_scores(), run.trainer_scores()
    assert np.abs(server - trainer).max() > 0.05  # this much expelled a server at version 0
    baseline, comparison = calibrate(server, trainer, TOLERANCE)
    assert comparison.fault == ""
    for _ in range(3):
        run.step(1e-5)
        run.receive()
        run.load()
        assert not run.digest_fault()
        baseline, comparison = check_version(baseline, run.server_scores(), run.trainer_scores())
        assert comparison.fault == ""
        assert comparison.difference < 0.8 * comparison.limit


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-5])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_in_one_update_is_found_at_every_step_size(run: StandIn, fault: str, learning_rate: float) -> None:
    for _ in range(3):
        run.step(learning_rate)
        run.spoil(fault)
        assert run.digest_fault()
        run.receive()
        run.load()
        assert not run.digest_fault()


@pytest.mark.slow
def test_log_probabilities_alone_see_a_swapped_pair_and_cannot_see_a_missed_small_step(run: StandIn) -> None:
    baseline, _ = calibrate(run.server_scores(), run.trainer_scores(), TOLERANCE)
    run.step(1e-6)
    run.spoil("swallowed")
    assert check_version(baseline, run.server_scores(), run.trainer_scores())[1].fault == ""
    run.spoil("swapped pair")
    assert check_version(baseline, run.server_scores(), run.trainer_scores())[1].fault
    run.load()
