"""A rank's buffers: how many there are, and which versions servers may still pull."""

import pytest
import torch

from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.publish.origin import STRIPE_UNIT, Snapshots
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.transfer.buffers import BufferRegistry, WithdrawnError

WEIGHT = {"w": torch.zeros(STRIPE_UNIT, dtype=torch.uint8)}
LAYOUT = Layout(tuple(spec_of(*item) for item in WEIGHT.items()))


class Rank:
    def __init__(self, *, delta: bool = False) -> None:
        self.registry, self.is_delta = BufferRegistry(), delta
        self.snapshots = Snapshots("run", self.registry, torch.device("cpu"), rank=0, ranks=1)

    def take_snapshot(self, version: int, kept: int | None = None) -> torch.Tensor:
        return self.snapshots.take_snapshot(
            version, WEIGHT.items(), LAYOUT, SnapshotPlan(kept=kept, is_delta=self.is_delta)
        ).buffer

    def there(self, upto: int) -> list[int]:
        return [version for version in range(upto + 1) if self.registry.find(f"run/{version}") is not None]


def test_one_buffer_is_used_again_while_servers_keep_up() -> None:
    rank = Rank()
    assert len({rank.take_snapshot(version).data_ptr() for version in range(5)}) == 1
    assert rank.there(4) == [4]


def test_version_that_a_straggler_pulls_stays_and_no_third_buffer_is_made() -> None:
    rank = Rank()
    first = rank.take_snapshot(0)
    second = rank.take_snapshot(1, kept=0)
    assert rank.there(1) == [0, 1]
    assert rank.take_snapshot(2, kept=0) is second
    assert rank.there(2) == [0, 2]
    assert rank.take_snapshot(3, kept=2) is first
    assert rank.there(3) == [2, 3]


def test_straggler_that_has_ended_leaves_one_buffer() -> None:
    rank = Rank()
    rank.take_snapshot(0)
    rank.take_snapshot(1, kept=0)
    rank.take_snapshot(2)
    assert rank.there(2) == [2]


def test_withdrawn_version_is_refused_at_once() -> None:
    rank = Rank()
    rank.take_snapshot(0)
    rank.take_snapshot(1)
    with pytest.raises(WithdrawnError):
        rank.registry.wait_for("run/0", 0, 1, timeout_s=60)
    assert rank.registry.wait_for("run/2", 0, 1, timeout_s=0.01) is None


def test_base_of_a_delta_is_kept() -> None:
    rank = Rank(delta=True)
    for version in range(4):
        rank.take_snapshot(version)
    assert rank.there(3) == [2, 3]


def test_rank_beyond_a_small_models_stripes_holds_nothing() -> None:
    snapshots = Snapshots("run", BufferRegistry(), torch.device("cpu"), rank=3, ranks=4)
    assert snapshots.take_snapshot(0, WEIGHT.items(), LAYOUT, SnapshotPlan()).buffer.numel() == 0
