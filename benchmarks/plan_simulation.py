"""`python -m benchmarks.plan_simulation --gpus 16 …`: checks the planner's recommendation by a discrete simulation.

It takes the arguments of `python -m pipelinerl.plan` and simulates the pipeline that this recommends. The formulas that
it checks are those of ``pipelinerl.plan.throughput``.
"""

import argparse
import sys
from collections.abc import Sequence

import msgspec
import numpy as np
from rich.console import Console

from pipelinerl.errors import ConfigError
from pipelinerl.plan import split
from pipelinerl.plan.throughput import PipelinePlan, Workload, pipeline_plan


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    rate: float
    """Trained tokens per time, after the start-up."""
    largest_lag: int
    mean_lag: float


def simulate_pipeline(
    work: Workload, generating: int, concurrency: int, num_steps: int, *, seed: int = 0, ready_batches: int = 1
) -> Simulated:
    """Simulate a pipeline that generates and trains at the same time.

    Generation pauses while ``ready_batches`` whole batches wait. Slots start at random places of their sequences, and
    the result leaves out the batches with these first sequences.

    Args:
        generating: devices that generate.
        concurrency: sequences at a time per generating device.
        num_steps: optimizer steps.
    """
    rng = np.random.default_rng(seed)
    slots = concurrency * generating
    step_time = slots / pipeline_plan(work, generating, concurrency).generation_rate
    train_time = work.train_time / (work.devices - generating)
    ends = np.ceil(rng.random(slots) * work.lengths.sample(rng, slots)).astype(np.int64) - 1
    lengths = ends + 1
    queue: list[tuple[int, int]] = []
    """(decoding step of the last token, length) of finished sequences"""
    updates: list[float] = []
    """times at which the optimizer steps ended"""
    trained: list[np.ndarray] = []
    versions: list[int] = []
    """optimizer steps done when each decoding step began"""
    now, step = 0.0, 0
    while len(updates) < num_steps:
        while len(queue) >= work.batch_size:
            start = max(updates[-1], now) if updates else now
            if start > now and len(queue) < ready_batches * work.batch_size:
                break
            now = start
            batch, queue = np.array(queue[: work.batch_size]), queue[work.batch_size :]
            updates.append(start + float(batch[:, 1].sum()) * train_time)
            trained.append(batch)
        versions.append((versions[-1] if versions else 0) + _newly_done(updates, versions, now))
        now += step_time
        for slot in np.flatnonzero(ends <= step):
            queue.append((step, int(lengths[slot])))
            lengths[slot] = work.lengths.sample(rng, 1)[0]
            ends[slot] = step + lengths[slot]
        step += 1
    return _measure(trained, updates, np.array(versions), slots)


def _newly_done(updates: list[float], versions: list[int], now: float) -> int:
    known = versions[-1] if versions else 0
    return sum(1 for end in updates[known:] if end <= now)


def _measure(trained: list[np.ndarray], updates: list[float], versions: np.ndarray, slots: int) -> Simulated:
    """Rates and lags without the start-up: the batches that hold the first ``slots`` sequences."""
    batch_size = len(trained[0])
    first = min(2 * slots // batch_size + 1, len(trained) - 2)
    summed = np.concatenate([[0], np.cumsum(versions)])
    total, count, largest = 0.0, 0, 0
    for index in range(first, len(trained)):
        last, length = trained[index].T
        begin = last - length + 1
        largest = max(largest, int((index - versions[begin]).max()))
        total += float((index * length - (summed[last + 1] - summed[begin])).sum())
        count += int(length.sum())
    tokens = sum(int(batch[:, 1].sum()) for batch in trained[first + 1 :])
    return Simulated(rate=tokens / (updates[-1] - updates[first]), largest_lag=largest, mean_lag=total / count)


SIMULATED_STEPS = 150
MAX_SIMULATED_SLOTS = 4096


def print_simulation(console: Console, work: Workload, plan: PipelinePlan) -> dict[str, float]:
    slots = plan.generating * plan.concurrency
    if slots > MAX_SIMULATED_SLOTS:
        raise ConfigError(
            f"the simulation takes at most {MAX_SIMULATED_SLOTS} sequences at a time, the plan has {slots}"
        )
    steps = SIMULATED_STEPS + 4 * slots // work.batch_size
    simulated = simulate_pipeline(work, plan.generating, plan.concurrency, steps)
    console.print(
        f"Simulated: {simulated.rate:,.0f} tokens/s ({simulated.rate / plan.rate:.3f} of the formula), lag mean "
        f"{simulated.mean_lag:.1f}, largest {simulated.largest_lag} (queue and batch under training included)"
    )
    return msgspec.to_builtins(simulated)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    split.add_arguments(parser)
    console = Console()
    work, plan, _ = split.recommend_split(parser.parse_args(argv), console)
    print_simulation(console, work, plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
