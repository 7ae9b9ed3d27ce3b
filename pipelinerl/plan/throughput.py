"""Throughput and lag of pipelined and conventional training (docs/algorithms.md §8, which explains the symbols).

Rates are in tokens of one fully utilised device per unit of time. With absolute rates (tokens/s) instead of
utilisations the same formulas give tokens/s. Source: arXiv 2509.19128 A.4.
"""

import math
from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from pipelinerl.plan.lengths import Lengths

Utilisation = Callable[[np.ndarray | float], np.ndarray]

CONCURRENCY_STEP = 8
"""Concurrency is searched in multiples of this, because engines pad their batches."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a run, its devices and their speed."""

    devices: int
    batch_size: int
    lengths: Lengths
    train_time: float
    """τ"""
    utilisation: Utilisation
    """U"""
    max_concurrency: int = 250
    """Largest H per device that memory (or the fit of U) allows."""
    devices_per_server: int = 1
    devices_per_trainer_group: int = 1
    """Sequence parallelism: trainer devices come in groups of this size."""
    update_pause: float = 0.0
    """Pipeline: time for which each weight update stops decoding."""
    phase_gap: float = 0.0
    """Conventional: time of each phase in which nothing is decoded or trained (weight update, moving the batch)."""


class PipelinePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the pipeline."""

    generating: int
    """I"""
    concurrency: int
    """H per device"""
    rate: float
    generation_rate: float
    training_rate: float
    largest_lag: int
    mean_in_flight_lag: float
    """Mean over tokens, without the lag that queueing and packing add."""
    mean_rollout_lag: float
    """H·I / B, the optimizer steps while a sequence is generated, mean over the sequences."""

    def within(self, bound: int | None, *, in_the_mean: bool) -> bool:
        """Whether the plan respects a bound on the lag, of the longest sequence or in the mean over all."""
        return bound is None or (self.mean_rollout_lag if in_the_mean else self.largest_lag) <= bound


def conventional_generation_rate(work: Workload, steps_per_phase: int) -> float:
    """Tokens per time of all N devices while a phase of B·G sequences is generated, including its tail.

    Sequences above ``max_concurrency`` per device wait, so devices drain only after the last sequence has started.
    """
    sequences = work.batch_size * steps_per_phase / work.devices
    tokens = sequences * work.lengths.mean
    if sequences <= work.max_concurrency:
        return work.devices * tokens / _drain_time(work, sequences, work.lengths.alive)
    tail = work.lengths.residual_alive
    full = max(tokens - work.max_concurrency * float(tail.sum()), 0.0) / float(work.utilisation(work.max_concurrency))
    return work.devices * tokens / (full + _drain_time(work, work.max_concurrency, tail))


def _drain_time(work: Workload, sequences: float, alive: np.ndarray) -> float:
    """Σ over steps of h(l)/U(h(l)) for this number of sequences per device, until the last of all devices ends.

    A step is made if any sequence is alive, because few of a small batch come near the longest length. h is the mean
    number of sequences alive given that at least one is. The sum is exact if the time of a step is affine in h.
    """
    alive = alive[alive > 0]
    made = -np.expm1(sequences * work.devices * np.log1p(-np.minimum(alive, 1.0 - 1e-12)))
    height = sequences * alive / made
    return float((made * height / work.utilisation(height)).sum())


def conventional_rate(work: Workload, steps_per_phase: int) -> float:
    """1/r = 1/r_gen + 1/r_train (+ the gap between them), as both phases use all devices, one after the other."""
    generation = conventional_generation_rate(work, steps_per_phase)
    gap = work.phase_gap / (work.batch_size * steps_per_phase * work.lengths.mean)
    return 1.0 / (1.0 / generation + work.train_time / work.devices + gap)


def largest_lag(work: Workload, generating: int, concurrency: int) -> int:
    """g_max = ⌈H·I·L / (L̄·B)⌉, the optimizer steps while the longest sequence is generated.

    Args:
        generating: I, the number of devices that generate.
        concurrency: H, the sequences at a time per generating device.
    """
    in_flight = concurrency * generating * work.lengths.longest
    return math.ceil(in_flight / (work.lengths.mean * work.batch_size) - 1e-9)


def mean_in_flight_lag(work: Workload, generating: int, concurrency: int) -> float:
    """Mean over tokens of the optimizer steps from the sampling of a token to the end of its sequence.

    A token has on average E[ℓ²]/(2·L̄) tokens after it, and H·I/(L̄·B) optimizer steps pass per decoding step.
    `generating` is I and `concurrency` is H.
    """
    remaining = work.lengths.mean_square / (2.0 * work.lengths.mean)
    return remaining * concurrency * generating / (work.lengths.mean * work.batch_size)


def pipeline_plan(work: Workload, generating: int, concurrency: int) -> PipelinePlan:
    """r = min(U(H)·I, (N − I)/τ) with its lags. Each weight update also stops decoding for ``update_pause``.

    `generating` is I and `concurrency` is H.
    """
    decoding = float(work.utilisation(concurrency)) * generating
    generation = 1.0 / (1.0 / decoding + work.update_pause / (work.batch_size * work.lengths.mean))
    training = (work.devices - generating) / work.train_time
    return PipelinePlan(
        generating=generating,
        concurrency=concurrency,
        rate=min(generation, training),
        generation_rate=generation,
        training_rate=training,
        largest_lag=largest_lag(work, generating, concurrency),
        mean_in_flight_lag=mean_in_flight_lag(work, generating, concurrency),
        mean_rollout_lag=concurrency * generating / work.batch_size,
    )


def _plans(work: Workload, lag_bound: int | None, *, in_the_mean: bool) -> list[PipelinePlan]:
    every = (
        pipeline_plan(work, generating, concurrency)
        for generating in _splits(work)
        for concurrency in _concurrencies(work)
    )
    return [plan for plan in every if plan.within(lag_bound, in_the_mean=in_the_mean)]


def _splits(work: Workload) -> Iterable[int]:
    for generating in range(work.devices_per_server, work.devices, work.devices_per_server):
        if (work.devices - generating) % work.devices_per_trainer_group == 0:
            yield generating


def _concurrencies(work: Workload) -> Iterable[int]:
    step = min(CONCURRENCY_STEP, work.max_concurrency)
    return range(step, work.max_concurrency + 1, step)


def recommend(
    work: Workload, lag_bound: int | None = None, tolerance: float = 0.02, *, in_the_mean: bool = False
) -> PipelinePlan | None:
    """The plan with the smallest lag among those within ``tolerance`` of the fastest. None if no plan is allowed.

    ``in_the_mean``: the bound is on the mean over sequences, which pacing enforces, and not on the longest one.
    """
    plans = _plans(work, lag_bound, in_the_mean=in_the_mean)
    if not plans:
        return None
    fastest = max(plan.rate for plan in plans)
    near = [plan for plan in plans if plan.rate >= (1.0 - tolerance) * fastest]
    return min(near, key=lambda plan: (plan.generating * plan.concurrency, -plan.rate))


QUEUED_STEPS = 2
"""Steps between publication and training: one for the batch being filled and one for the batch being trained."""
TOLERATED = 0.01
"""Largest share of the longest tenth that a recommended bound drops."""


class DropShares(msgspec.Struct, frozen=True, kw_only=True):
    """Share of rollouts whose oldest token is beyond the bound, of all and of the longest tenth."""

    rollouts: float
    longest_tenth: float


def steps_per_token(work: Workload, plan: PipelinePlan) -> float:
    """Optimizer steps that pass while a slot decodes one token."""
    return plan.concurrency * plan.generating / (work.lengths.mean * work.batch_size)


def drop_shares(work: Workload, plan: PipelinePlan, attempts: int, max_lag_steps: int) -> DropShares:
    """Predict the shares for groups of ``attempts`` rollouts and a bound of ``max_lag_steps`` optimizer steps."""
    longest_kept = max(math.floor((max_lag_steps - QUEUED_STEPS) / steps_per_token(work, plan) + 1e-9), 0)
    below = float(work.lengths.probabilities[:longest_kept].sum())
    tenth = _longest_tenth(work.lengths.probabilities)
    kept_tenth = float(tenth[:longest_kept].sum()) * below ** (attempts - 1)
    return DropShares(rollouts=1.0 - below**attempts, longest_tenth=1.0 - kept_tenth)


def recommended_bound(work: Workload, plan: PipelinePlan, attempts: int) -> int:
    """The lowest `max_lag_steps` that drops at most 1 % of the longest tenth, for groups of ``attempts`` rollouts."""
    bound = QUEUED_STEPS
    while drop_shares(work, plan, attempts, bound).longest_tenth > TOLERATED:
        bound += 1
    return bound


def _longest_tenth(probabilities: np.ndarray) -> np.ndarray:
    """[L] probabilities of the lengths in the longest tenth."""
    above = np.cumsum(probabilities[::-1])[::-1]
    part = np.minimum(probabilities, np.maximum(0.1 - (above - probabilities), 0.0))
    return part / part.sum()
