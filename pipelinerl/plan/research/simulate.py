"""A discrete simulation of the pipeline, which checks the formulas of ``throughput``.

It decodes step by step, trains B finished sequences per optimizer step in the order in which they finish, and counts
for every trained token the optimizer steps since it was sampled. Work per token is that of ``Workload``.
"""

import msgspec
import numpy as np

from pipelinerl.plan.throughput import Workload, pipeline_plan


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
