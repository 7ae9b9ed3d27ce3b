"""The model of throughput and lag: the paper's numbers, hand-computed cases, and the simulation beside the formula."""

import numpy as np
import pytest

from benchmarks.plan_simulation import Simulated, simulate_pipeline
from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.throughput import (
    Workload,
    conventional_generation_rate,
    conventional_rate,
    largest_lag,
    mean_in_flight_lag,
    pipeline_plan,
    recommend,
)

PAPER_TRAIN_TIME = 4.92


def paper_utilisation(h: np.ndarray | float) -> np.ndarray:
    """Fit for h ≤ 250."""
    return -1.8 * np.expm1(-np.asarray(h, dtype=np.float64) / 800.0)


PAPER = Workload(
    devices=128,
    batch_size=128,
    lengths=Lengths.uniform(8192),
    train_time=PAPER_TRAIN_TIME,
    utilisation=paper_utilisation,
)


def make_workload(**changes) -> Workload:
    defaults = {
        "devices": 16,
        "batch_size": 32,
        "lengths": Lengths.uniform(200),
        "train_time": PAPER_TRAIN_TIME,
        "utilisation": paper_utilisation,
    }
    return Workload(**{**defaults, **changes})


class TestPaper:
    """arXiv 2509.19128, appendix A.4."""

    def test_conventional_phases_and_their_sum(self):
        assert conventional_generation_rate(PAPER, 133) == pytest.approx(18.4, abs=0.05)
        assert PAPER.devices / PAPER.train_time == pytest.approx(26.0, abs=0.05)
        assert conventional_rate(PAPER, 133) == pytest.approx(10.77, abs=0.01)

    def test_pipeline_optimum(self):
        plan = recommend(PAPER, 133, tolerance=0.0)
        assert (plan.concurrency, plan.generating, plan.largest_lag) == (192, 44, 132)
        assert plan.rate == pytest.approx(16.90, abs=0.01)

    @pytest.mark.parametrize(("bound", "ratio"), [(8, 1.04), (16, 1.08), (32, 1.16), (64, 1.32), (133, 1.57)])
    def test_speed_up_by_lag_bound(self, bound, ratio):
        pipeline = recommend(PAPER, bound, tolerance=0.0)
        assert pipeline.rate / conventional_rate(PAPER, bound) == pytest.approx(ratio, abs=0.005)


def test_constant_lengths_generate_at_the_utilisation_of_the_phase():
    # 32 sequences of 10 tokens on 16 devices: 2 each, all alive to the end, so every device decodes at U(2)
    work = make_workload(lengths=Lengths.constant(10))
    assert conventional_generation_rate(work, 1) == pytest.approx(16 * float(paper_utilisation(2.0)), rel=1e-12)


def make_pair(**changes) -> Workload:
    """One device on which every step takes 4 units whatever h; 2 sequences of 1 or 3 tokens, equally likely."""
    fields = {
        "devices": 1,
        "batch_size": 2,
        "lengths": Lengths(np.array([0.5, 0.0, 0.5])),
        "train_time": 0.5,
        "utilisation": lambda h: np.asarray(h, dtype=float) / 4,
    }
    return Workload(**(fields | changes))


def test_two_lengths_by_hand():
    # 3 steps (12 units), but 1 step (4 units) when both are short, once in four: 10 units for 4 tokens on average;
    # training 4 tokens at τ = 0.5 takes 2 units
    assert conventional_generation_rate(make_pair(), 1) == pytest.approx(4 / 10)
    assert conventional_rate(make_pair(), 1) == pytest.approx(4 / 12)


def test_tail_of_several_devices_ends_with_the_last_of_all():
    # the same on 2 devices with 2 sequences each: all four are short once in sixteen
    work = make_pair(devices=2, batch_size=4)
    assert conventional_generation_rate(work, 1) == pytest.approx(8 / (12 * 15 / 16 + 4 / 16))


def test_gap_and_pause_by_hand():
    # a gap of 3 units per phase of 2 steps, which holds 8 tokens
    gap = 1 / conventional_rate(make_pair(phase_gap=3.0), 2) - 1 / conventional_rate(make_pair(), 2)
    assert gap == pytest.approx(3 / 8)
    # 4 tokens per step at U(8) = 2 take 2 units and one of pause
    plan = pipeline_plan(make_pair(devices=2, train_time=0.1, update_pause=1.0), 1, 8)
    assert plan.generation_rate == pytest.approx(4 / 3)


def test_pipeline_rate_is_the_narrow_side():
    work = make_workload(train_time=4.0, utilisation=lambda h: np.asarray(h, dtype=float) / 100)
    plan = pipeline_plan(work, 4, 50)
    assert (plan.generation_rate, plan.training_rate, plan.rate) == (2.0, 3.0, 2.0)


def test_lags_by_hand():
    # 8 sequences on each of 4 devices, batches of 32, lengths 1 … 200: mean 100.5, longest 200
    work = make_workload()
    assert largest_lag(work, 4, 8) == 2  # ⌈32·200/(100.5·32)⌉ = ⌈1.99⌉
    # E[ℓ²] = 201·401/6 = 13,433.5; remaining 13,433.5/201 = 66.83; 66.83·32/(100.5·32) = 0.665
    assert mean_in_flight_lag(work, 4, 8) == pytest.approx(13433.5 / 201 / 100.5, rel=1e-12)


def test_split_respects_parallel_groups():
    plan = recommend(make_workload(devices_per_server=2, devices_per_trainer_group=4), tolerance=0.0)
    assert plan.generating % 2 == 0
    assert (16 - plan.generating) % 4 == 0


def test_concurrency_is_searched_in_eights():
    work = make_workload(max_concurrency=30, train_time=1e-3)
    assert recommend(work, tolerance=0.0).concurrency == 24


def test_bound_that_nothing_respects_gives_no_plan():
    assert recommend(make_workload(batch_size=1), 1) is None


def test_recommendation_has_less_in_flight_for_almost_the_same_rate():
    best, chosen = recommend(PAPER, tolerance=0.0), recommend(PAPER)
    assert chosen.rate >= 0.98 * best.rate
    assert chosen.largest_lag < best.largest_lag


def test_more_sequences_than_fit_are_generated_one_after_the_other():
    # constant lengths, 128 per device of which 2 fit: the devices decode two at a time from beginning to end
    work = make_workload(lengths=Lengths.constant(50), max_concurrency=2)
    unlimited = make_workload(lengths=Lengths.constant(50))
    assert conventional_generation_rate(work, 64) == pytest.approx(conventional_generation_rate(unlimited, 1), rel=0.02)


@pytest.mark.parametrize(("generating", "concurrency"), [(6, 64), (3, 128), (12, 8)])
def test_simulated_pipeline_agrees_with_the_formula(generating, concurrency):
    work = make_workload()
    plan = pipeline_plan(work, generating, concurrency)
    simulated = simulate_pipeline(work, generating, concurrency, num_steps=250)
    assert simulated.rate == pytest.approx(plan.rate, rel=0.02)
    # the queue and the batch under training add at most two steps to what is in flight
    assert plan.largest_lag - 1 <= simulated.largest_lag <= plan.largest_lag + 2
    assert plan.mean_in_flight_lag * 0.95 <= simulated.mean_lag <= plan.mean_in_flight_lag + 2


def test_simulated_trainer_limited_pipeline_runs_at_the_trainers_rate():
    work = make_workload(train_time=20.0)
    simulated = simulate_pipeline(work, 12, 64, num_steps=200)
    assert simulated.rate == pytest.approx(4 / 20.0, rel=0.01)


def simulate_conventional(work: Workload, steps_per_phase: int, num_phases: int, *, seed: int = 0) -> Simulated:
    """Simulate phases that generate on all devices and then train on all devices.

    Args:
        steps_per_phase: optimizer steps per phase.
    """
    rng = np.random.default_rng(seed)
    tokens, elapsed = 0, 0.0
    for _ in range(num_phases):
        lengths = work.lengths.sample(rng, work.batch_size * steps_per_phase)
        elapsed += max(_decode_time(part, work) for part in np.array_split(lengths, work.devices))
        elapsed += int(lengths.sum()) * work.train_time / work.devices
        tokens += int(lengths.sum())
    return Simulated(rate=tokens / elapsed, largest_lag=steps_per_phase - 1, mean_lag=(steps_per_phase - 1) / 2)


def _decode_time(lengths: np.ndarray, work: Workload) -> float:
    """Time that one device needs for its sequences. A finished sequence makes room for the next."""
    waiting = list(lengths[work.max_concurrency :])
    remaining = lengths[: work.max_concurrency].copy()
    elapsed = 0.0
    while len(remaining):
        steps = int(remaining.min())
        elapsed += steps * len(remaining) / float(work.utilisation(len(remaining)))
        remaining -= steps
        finished = int((remaining == 0).sum())
        started, waiting = waiting[:finished], waiting[finished:]
        remaining = np.concatenate([remaining[remaining > 0], np.array(started, dtype=remaining.dtype)])
    return elapsed


@pytest.mark.parametrize(("steps_per_phase", "max_concurrency"), [(8, 250), (64, 250), (64, 32)])
def test_simulated_conventional_agrees_with_the_formula(steps_per_phase, max_concurrency):
    work = make_workload(max_concurrency=max_concurrency)
    simulated = simulate_conventional(work, steps_per_phase, num_phases=6)
    assert simulated.rate == pytest.approx(conventional_rate(work, steps_per_phase), rel=0.05)
