"""Checkpoints are whole or not there, the newest whole one is found, old ones go."""

import os
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import CheckpointError
from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.checkpoints import CheckpointReader, CheckpointWriter, Counters, newest_valid, prune

STATE = {"param": torch.arange(6.0).view(2, 3), "exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.zeros(2, 3)}


def publish(root: Path, step: int) -> Path:
    writer = CheckpointWriter(root, step)
    copy = {key: tensor.clone() for key, tensor in STATE.items()}
    writer.write_state([("a.weight", STATE), ("b.weight", copy)])
    checkpoints.save_rng(writer.path, 0, torch.device("cpu"))
    return writer.publish(Counters(step=step, samples_processed=8 * step, tokens_processed=9, positions={"0/0": step}))


def test_published_checkpoint_is_read_back(tmp_path: Path) -> None:
    reader = CheckpointReader(publish(tmp_path, 3))
    assert reader.counters == Counters(step=3, samples_processed=24, tokens_processed=9, positions={"0/0": 3})
    for key, tensor in reader.state("b.weight").items():
        assert torch.equal(tensor, STATE[key])
    with pytest.raises(CheckpointError, match=r"no state of parameter .c\.weight."):
        reader.state("c.weight")


def test_rng_restored_continues_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    path = publish(tmp_path, 1)
    expected = torch.rand(3)
    torch.rand(7)
    states = CheckpointReader(path).rng(0)
    assert states is not None
    checkpoints.restore_rng(states, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)
    assert CheckpointReader(path).rng(1) is None


@pytest.mark.parametrize("name", ["manifest.json", "state-00000.safetensors", "rng-0.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damaged_newest_checkpoint_is_passed_over_with_a_message(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
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
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.counters.step == 1
    assert "step_2" in caplog.text


def test_unpublished_checkpoint_is_not_found_and_is_swept(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    CheckpointWriter(tmp_path, 2).write_state([("a.weight", STATE)])
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.counters.step == 1
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
    assert CheckpointReader(path).counters.step == 4
    assert os.listdir(tmp_path) == ["step_4"]


def test_no_checkpoint_gives_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none") is None
