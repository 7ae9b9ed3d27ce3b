"""Checkpoints are whole or not there, the newest whole one is found, old ones go, pieces of any cut fit any other."""

import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.errors import CheckpointError
from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.checkpoints import Counters, newest_whole, prune
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.records import DataOrder
from pipelinerl.records.order import DomainOrder, EpochOrder
from tests.says import says

WEIGHT = torch.arange(10.0)
ALONE = Peers()


class Threads(Peers):
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, box: list[Any]):
        super().__init__(rank)
        self.world_size, self._barrier, self._box = barrier.parties, barrier, box

    def gather(self, value: Any) -> list[Any]:
        self._box[self.rank] = value
        self._barrier.wait(60)
        values = list(self._box)
        self._barrier.wait(60)
        return values


ORDER = DataOrder(domains={"d": DomainOrder(samples=3, epochs={1: EpochOrder(size=9, settled=((0, 2),))})})


def on_ranks(count: int, work: Callable[[Peers], Any]) -> list[Any]:
    """Each rank's result of ``work``, or the error it raised."""
    barrier, box = threading.Barrier(count), [None] * count
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, barrier, box))
        except CheckpointError as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def whole() -> dict[str, Piece]:
    return {"a.param": Piece(WEIGHT.clone(), 0, 10), "b.param": Piece(-WEIGHT[:3], 0, 3)}


def publish(root: Path, step: int) -> Path:
    counters = Counters(
        step=step, samples_processed=8 * step, tokens_processed=9, positions={"0/0": step}, orders={0: ORDER}
    )
    return checkpoints.write(ALONE, root, {**whole(), **checkpoints.rng_pieces(0, torch.device("cpu"))}, counters)


def empty(start: int, end: int, of: int = 10) -> Piece:
    return Piece(torch.zeros(end - start), start, of)


def test_published_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = publish(tmp_path, 3)
    found = newest_whole(ALONE, tmp_path)
    assert found == (
        path,
        Counters(step=3, samples_processed=24, tokens_processed=9, positions={"0/0": 3}, orders={0: ORDER}),
    )
    pieces = {"a.param": empty(0, 10), "b.param": empty(0, 3, of=3)}
    assert checkpoints.read(path, pieces) == {"a.param", "b.param"}
    assert pieces["a.param"].tensor.tolist() == list(range(10))
    assert pieces["b.param"].tensor.tolist() == [0, -1, -2]


@pytest.mark.parametrize("cuts", [(0, 10), (0, 4, 10), (0, 1, 5, 10)])
def test_any_cut_is_read_from_what_three_ranks_wrote(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    """Ranks wrote elements 0-2, 3-8 and 9; each reader's range comes out of several files."""
    written = [(0, 3), (3, 9), (9, 10)]

    def write(peers: Peers) -> Path:
        start, end = written[peers.rank]
        pieces = {"a.param": Piece(WEIGHT[start:end].clone(), start, 10)}
        return checkpoints.write(peers, tmp_path, pieces, Counters(step=1, positions={f"0/{peers.rank}": peers.rank}))

    [path, *_] = on_ranks(3, write)
    assert checkpoints.read_counters(path).positions == {"0/0": 0, "0/1": 1, "0/2": 2}
    for start, end in pairwise(cuts):
        piece = empty(start, end)
        checkpoints.read(path, {"a.param": piece})
        assert piece.tensor.tolist() == list(range(start, end))


@pytest.mark.parametrize("second", [(2, 10), (4, 10)])
def test_pieces_that_overlap_or_leave_a_gap_are_refused_on_all_ranks(tmp_path: Path, second: tuple[int, int]) -> None:
    def write(peers: Peers) -> Path:
        start, end = [(0, 3), second][peers.rank]
        return checkpoints.write(peers, tmp_path, {"a.param": empty(start, end)}, Counters(step=1))

    errors = on_ranks(2, write)
    assert all(isinstance(error, CheckpointError) and "a.param" in str(error) for error in errors)
    assert os.listdir(tmp_path) == []


def test_a_failure_on_one_rank_fails_all_and_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    publish(tmp_path, 1)

    def write(peers: Peers) -> Path:
        start = 5 * peers.rank
        piece = Piece(WEIGHT[start : start + 5].clone(), start, 10)
        if peers.rank == 1:
            peers.gather = forbid_write(peers.gather, tmp_path)  # type: ignore[method-assign]
        return checkpoints.write(peers, tmp_path, {"a.param": piece}, Counters(step=2))

    def forbid_write(gather: Callable[[Any], list[Any]], root: Path) -> Callable[[Any], list[Any]]:
        file = root / ".step_2.new" / "shard-00002-model-00001-of-00001.safetensors"
        forbidden = False

        def gather_and_block(value: Any) -> list[Any]:
            nonlocal forbidden
            answer = gather(value)
            if not forbidden and file.parent.is_dir():  # once: rank 0 removes the folder when it has failed
                file.mkdir()
                forbidden = True
            return answer

        return gather_and_block

    errors = on_ranks(2, write)
    assert all("rank 1: " in str(error) and "Is a directory" in str(error) for error in errors)
    assert [path.name for _, path in checkpoints.list_steps(tmp_path)] == ["step_1"]


def test_a_large_state_is_spread_over_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FILE_BYTES", 40)
    path = publish(tmp_path, 1)
    assert len(list(path.glob("*.safetensors"))) == 2  # a has 40 bytes
    pieces = {"a.param": empty(0, 10), "b.param": empty(1, 3, of=3)}
    checkpoints.read(path, pieces)
    assert pieces["b.param"].tensor.tolist() == [-1, -2]


def test_state_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = publish(tmp_path, 1)
    with pytest.raises(CheckpointError, match=says("nothing", "'c.param'", 10)):
        checkpoints.read(path, {"c.param": empty(0, 10)})
    with pytest.raises(CheckpointError, match=says(3, "'b.param'", 4)):
        checkpoints.read(path, {"b.param": empty(0, 4, of=4)})


def test_rng_restored_continues_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    path = publish(tmp_path, 1)
    expected = torch.rand(3)
    torch.rand(7)
    rng = checkpoints.rng_pieces(0, torch.device("cpu"))
    checkpoints.restore_rng(rng, checkpoints.read(path, {}, rng), torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
    assert checkpoints.read(path, {}, checkpoints.rng_pieces(1, torch.device("cpu"))) == set()


@pytest.mark.parametrize("name", ["manifest.json", "shard-00001-model-00001-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_damaged_newest_checkpoint_is_passed_over_with_a_message(
    tmp_path: Path, name: str, damage: str, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path, 1)
    file = publish(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        file.unlink()
    for found in on_ranks(ranks, lambda peers: newest_whole(peers, tmp_path)):
        assert found[1].step == 1
    assert "step_2" in caplog.text


def test_unpublished_checkpoint_is_not_found_and_is_swept(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    checkpoints.begin(ALONE, tmp_path, 2)
    found = newest_whole(ALONE, tmp_path)
    assert found is not None
    assert found[1].step == 1
    prune(tmp_path, keep=1)
    assert os.listdir(tmp_path) == ["step_1"]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        publish(tmp_path, step)
    assert [path.name for path in prune(tmp_path, keep=2)] == ["step_100", "step_20"]
    assert sorted(os.listdir(tmp_path)) == ["step_100", "step_20"]


def test_publishing_a_step_again_replaces_it(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    path = publish(tmp_path, 4)
    assert checkpoints.read_counters(path).step == 4
    assert os.listdir(tmp_path) == ["step_4"]


def test_everything_is_on_the_disk_before_the_name_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, then their folder, then the rename, then the parent folder."""
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def record_sync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(old: Path, new: Path) -> None:
        events.append(f"rename to {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    publish(tmp_path, 1)
    shard = "shard-00001-model-00001-of-00001.safetensors"
    published = events.index("rename to step_1")
    assert {shard, "manifest.json"} <= set(events[:published])
    assert events[published - 1] == ".step_1.new"
    assert events[published + 1] == tmp_path.name


def test_no_checkpoint_gives_none(tmp_path: Path) -> None:
    assert newest_whole(ALONE, tmp_path / "none") is None
