"""A disk that is full or read-only: what a role says, and what is still there."""

import contextlib
import logging
import os
import subprocess
from pathlib import Path

import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import CheckpointError, ConfigError
from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.checkpoints import Counters, newest_whole
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.launcher.run_dir import claim, why_not_writable
from pipelinerl.observability.logging import LauncherLog
from pipelinerl.observability.metrics import MetricsLogger, read_metrics
from pipelinerl.observability.status import RoleStatus, read_statuses
from tests.says import says
from tests.states import read_state


def save(root: Path, step: int, numbers: int) -> None:
    piece = Piece(torch.full((numbers,), float(step)), 0, numbers)
    checkpoints.write(Peers(), root, {"w.param": piece}, Counters(step=step))


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler


def test_checkpoint_on_a_full_disk_is_an_error_that_leaves_the_earlier_one(small_disk: Path):
    root = small_disk / "checkpoints"
    save(root, 1, 1000)
    with pytest.raises(CheckpointError, match=says("checkpoint", "step 2", "No space left on device")):
        save(root, 2, 1 << 20)
    path, counters = newest_whole(Peers(), root)  # type: ignore[misc]
    assert counters.step == 1
    assert read_state(path)["w.param"].tolist() == [1.0] * 1000
    assert [path.name for path in root.iterdir()] == ["step_1"]
    save(root, 2, 1000)
    assert newest_whole(Peers(), root)[1].step == 2  # type: ignore[index]


def test_metrics_and_status_on_a_full_disk_stop_nobody(small_disk: Path):
    required = ["dataset_loader=a.load", "actor.rollout_policy=a.rollout", "wandb.mode=disabled"]
    metrics = MetricsLogger(parse(compose("base", [f"output_dir={small_disk}", *required])), small_disk, "finetune")
    metrics.log({"loss": 1.0}, step=1)
    status = RoleStatus(small_disk, "finetune_0")
    filler = fill(small_disk)
    for step in range(2, 200):
        metrics.log({"loss": 1.0}, step=step)
        status.progress(step=step)
    metrics.close()
    filler.unlink()
    status.close()
    assert read_metrics(small_disk, "finetune")[0]["step"] == 1
    assert read_statuses(small_disk)["finetune_0"].fields["step"] == 199


def test_launcher_log_whose_disk_fails_is_said_once_and_ends_nobody(capsys: pytest.CaptureFixture[str]):
    handler = LauncherLog(Path("/dev/full"))
    for text in ("one", "two"):
        handler.handle(logging.LogRecord("launcher", logging.INFO, "", 0, text, None, None))
    handler.close()
    assert capsys.readouterr().err == "/dev/full cannot be written: No space left on device\n"


def test_folder_that_became_read_only_explains_an_empty_log(small_disk: Path):
    assert why_not_writable(small_disk) is None
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert why_not_writable(small_disk) == f"{small_disk} cannot be written: Read-only file system"


def test_launcher_refuses_a_read_only_folder_by_its_name(small_disk: Path):
    (small_disk / "run").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(ConfigError, match=says("`output_dir`", "Read-only file system")):
        claim(small_disk / "run", {"model_path": "m", "tiny_model": None}, force_restart=False)
    assert os.listdir(small_disk / "run") == []
