"""Experiment trackers: what the libraries themselves wrote, and that several run beside each other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, load_old_run, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.tracking import COLUMNS
from pipelinerl.observability import wandb
from pipelinerl.observability.metrics import MetricsLogger, read_metrics
from tests.run_folder import Story, make_run

ROOT = Path(__file__).resolve().parents[3]


def config(run_dir: Path, *overrides: str) -> Config:
    given = [f"output_dir={run_dir}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    return parse(compose("base", [*given, *overrides]))


def test_tracker_is_one_or_several(tmp_path: Path) -> None:
    assert config(tmp_path).trackers == ("wandb",)
    assert config(tmp_path, "tracker=tensorboard").trackers == ("tensorboard",)
    assert config(tmp_path, "tracker=[trackio,wandb,trackio]").trackers == ("trackio", "wandb")
    assert config(tmp_path, "tracker=[wandb,tensorboard]", "wandb.mode=disabled").trackers == ("tensorboard",)
    assert config(tmp_path, "tracker=[]").trackers == ()
    with pytest.raises(ConfigError, match="tracker"):
        config(tmp_path, "tracker=comet")


def test_run_folder_with_a_long_name_has_names_that_wandb_takes(tmp_path: Path) -> None:
    section = config(tmp_path).wandb
    names = [wandb.run_identity(section, tmp_path / ("é" * 120 + end) / "run", "preprocessor_12") for end in "ab"]
    assert all(len(name["group"]) <= 128 >= len(name["name"]) for name in names)
    assert len({name["group"] for name in names}) == len({name["name"] for name in names}) == 2


def test_tensorboard_has_every_point_under_the_roles_name(tmp_path: Path) -> None:
    logger = MetricsLogger(config(tmp_path, "tracker=tensorboard"), tmp_path, "finetune")
    for step in (1, 2, 3):
        logger.log({"loss": step / 4, "entropy": float("nan")}, step=step)
    logger.close()

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(tmp_path / "tensorboard" / "finetune")).Reload()
    assert events.Tags()["tensors"] == ["finetune/loss"]
    found = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("finetune/loss")]
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(read_metrics(tmp_path, "finetune")) == 3


TRACKIO = """
import json, sys
from pathlib import Path
from pipelinerl.config.load import compose, parse
from pipelinerl.observability.trackio import TrackioTracker

run_dir = Path(sys.argv[1])
given = ["output_dir=" + sys.argv[1], "dataset_loader=a.b", "actor.rollout_policy=a.b", "tracker=trackio"]
cfg = parse(compose("base", given))
for values in ((0.5, 0.25), (0.125,)):  # a role that was restarted goes on with its run
    tracker = TrackioTracker(cfg, run_dir, "finetune")
    for step, value in enumerate(values):
        tracker.log({"finetune/loss": value}, step=step + 1 + 2 * (len(values) == 1))
    tracker.alert("entropy collapse", "entropy collapse since step 3: raise the bonus")
    tracker.table("launcher/rollouts", ("step", "text"), [[1, "hello"], [1, None]], step=1)
    tracker.finish()
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("pipeline-rl")
print("FOUND " + json.dumps({"runs": runs, "logs": SQLiteStorage.get_logs("pipeline-rl", runs[0])}, default=str))
"""


def test_trackio_has_points_alerts_and_tables_in_one_run_of_the_role(tmp_path: Path) -> None:
    environment = os.environ | {
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("FOUND ")[1].splitlines()[0])
    assert len(found["runs"]) == 1
    assert found["runs"][0].endswith("_finetune")
    losses = {(point["step"], point["finetune/loss"]) for point in found["logs"] if "finetune/loss" in point}
    assert losses == {(1, 0.5), (2, 0.25), (3, 0.125)}
    assert any("launcher/rollouts" in point for point in found["logs"])


WANDB_ROLE = """
import sys
from pathlib import Path
from pipelinerl.config.load import load_old_run
from pipelinerl.observability.metrics import MetricsLogger

logger = MetricsLogger(load_old_run(Path(sys.argv[1])), Path(sys.argv[1]), "finetune", once_per_step=True)
for step in map(int, sys.argv[2:]):
    logger.log({"loss": step / 4}, step=step)
logger.close()
"""
WANDB_LAUNCHER = """
import sys
from pathlib import Path
from pipelinerl.config.load import load_old_run
from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.launcher.tracking import RunTracking

run_dir = Path(sys.argv[1])
tracking = RunTracking(load_old_run(run_dir), run_dir)
for step in range(1, 7):
    tracking.step(step)
tracking.alarm(Finding(Level.REWARD, "hack", "it grew", "Look at it", step=3))
(run_dir / "report.html").write_text("<html></html>")
tracking.keep(run_dir / "report.html")
tracking.close()
"""


@pytest.mark.slow
def test_wandbs_own_library_keeps_everything_of_an_offline_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", Story(overrides=("wandb.mode=offline", "wandb.sample_steps=4")))
    roles = [(WANDB_ROLE, "1", "2", "3"), (WANDB_ROLE, "2", "3", "4"), (WANDB_LAUNCHER,)]
    for program, *steps in roles:  # the trainer's second process repeats two steps
        patience = "import pipelinerl.observability.trackers as t; t.FINISH_TIMEOUT_S = 60.0\n"  # of a loaded machine
        done = subprocess.run(
            [sys.executable, "-c", patience + program, str(run_dir), *steps],
            env=os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    cfg = load_old_run(run_dir)

    finetune, launcher = (list(wandb_records(run_dir, cfg, kind)) for kind in ("finetune", "launcher"))
    runs = [record.run for record in finetune if record.HasField("run")]
    assert {run.display_name for run in runs} == {wandb.run_identity(cfg.wandb, run_dir, "finetune")["name"]}
    for run in runs:
        given = {item.key: json.loads(item.value_json) for item in run.config.update}
        assert given["finetune"]["learning_rate"] == cfg.finetune.learning_rate
        assert given["output_dir"] == str(run_dir)
    points = [history_of(record) for record in finetune if record.HasField("history")]
    assert [(point["finetune/step"], point["finetune/loss"]) for point in points] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
        (4, 1.0),
    ]

    (table,) = (point for record in launcher if "launcher/rollouts" in (point := history_of(record)))
    assert (table["launcher/step"], table["launcher/rollouts"]["_type"]) == (4, "table-file")
    (file,) = run_dir.glob(f"wandb/offline-*/files/{table['launcher/rollouts']['path']}")
    rows = json.loads(file.read_text())
    assert rows["columns"] == list(COLUMNS)
    assert {row[0] for row in rows["data"]} == {3}
    assert "Which is the largest" in rows["data"][0][COLUMNS.index("text")]
    (alert,) = (record.alert for record in launcher if record.HasField("alert"))
    assert (alert.title, alert.text) == ("hack", "hack since step 3: it grew. Look at it")
    kept = {record.artifact.type: record.artifact for record in launcher if record.HasField("artifact")}
    (report,) = kept["report"].manifest.contents
    assert (report.path, report.size) == ("report.html", len("<html></html>"))


def history_of(record: Any) -> dict[str, Any]:
    """The values of a record of wandb's history."""
    values: dict[str, Any] = {}
    for item in record.history.item:
        inner = values
        for key in item.nested_key[:-1]:
            inner = inner.setdefault(key, {})
        inner[item.key or item.nested_key[-1]] = json.loads(item.value_json)
    return values


def wandb_records(run_dir: Path, cfg: Config, kind: str) -> Iterator[Any]:
    """The records of a role's offline runs, in the order of their processes."""
    from wandb.proto.wandb_internal_pb2 import Record

    identity = wandb.run_identity(cfg.wandb, run_dir, kind)["id"]
    for path in sorted(run_dir.glob(f"wandb/offline-run-*-{identity}/*.wandb"), key=lambda path: path.stat().st_mtime):
        for content in log_entries(path.read_bytes()):
            yield Record.FromString(content)


def log_entries(log: bytes) -> Iterator[bytes]:
    """The entries of a log in LevelDB's format, which has 7 bytes before it in wandb's files.

    A block of 32 KiB has parts of entries, each behind its checksum (4 bytes), length (2) and kind (whole 1, first 2,
    middle 3, last 4). A block's rest under 7 bytes is empty.
    """
    at, entry = 7, b""
    while at + 7 <= len(log):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        entry += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield entry
            entry = b""


def test_a_tracker_that_is_not_installed_costs_nothing_but_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    logger = MetricsLogger(config(tmp_path, "tracker=tensorboard"), tmp_path, "finetune")
    logger.log({"loss": 1.0}, step=1)
    logger.close()
    assert "event=tracker_failed tracker=tensorboard" in caplog.text
    assert len(read_metrics(tmp_path, "finetune")) == 1
