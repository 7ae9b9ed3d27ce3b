"""Peaks of memory from what the profiler saw of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.step_memory_rank import Allocations, DeviceAllocations, peaks_of

SPANS = {"first": (0, 9), "second": (10, 20)}


def test_a_phase_has_the_peak_of_its_own_time() -> None:
    blocks = [(12, 100, 5), (1, 0, 40), (13, 100, -5), (2, 50, 30), (5, 0, -40), (15, 0, 2)]
    assert peaks_of(SPANS, blocks) == {"first": 70, "second": 35}


@pytest.mark.parametrize(("address", "held"), [(100, 20), (95, 20), (105, 10)])
def test_a_block_whose_release_was_not_seen_ends_where_its_memory_is_used_again(address: int, held: int) -> None:
    """Gloo's threads release what a collective used."""
    assert peaks_of(SPANS, [(1, 100, 10), (2, 110, 10), (3, address, 10), (11, 300, 1)])["second"] == held + 1


def test_a_release_of_a_block_from_before_the_profile_takes_nothing_away() -> None:
    assert peaks_of(SPANS, [(1, 100, 10), (2, 500, -80), (11, 300, 1)]) == {"first": 10, "second": 11}


def test_tensor_that_another_thread_has_made_is_counted_once() -> None:
    """transformers loads weights in threads, and the profiler sees its own thread alone."""
    with Allocations() as allocations, ThreadPoolExecutor(1) as threads:
        with allocations.phase("loading"):
            made = [threads.submit(torch.zeros, 300_000).result(), torch.zeros(200_000)]
        allocations.add("loading", [*made, made[0][:5]])
        with allocations.phase("step"):
            torch.zeros(100_000)
    assert allocations.peaks()["step"] == pytest.approx(4 * 600_000, abs=1000)


def test_peak_of_a_device_has_no_workspaces_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are part of the plan's runtime, and as large as all tensors of a small model."""
    held = {"tensors": 100, "workspaces": 64}
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 300 + 64)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(held.values()))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.update(workspaces=0), raising=False)
    allocations = DeviceAllocations()
    with allocations.phase("step"):
        pass
    assert allocations.peaks() == {"step": 300}
