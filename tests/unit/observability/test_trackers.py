"""Experiment trackers: what the libraries themselves wrote, and that several run beside each other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.observability import wandb
from pipelinerl.observability.metrics import MetricsLogger, read_metrics
from pipelinerl.observability.trackers import chosen_trackers

ROOT = Path(__file__).resolve().parents[3]


def config(run_dir: Path, *overrides: str) -> Config:
    given = [f"output_dir={run_dir}", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    return parse(compose("base", [*given, *overrides]))


def test_tracker_is_one_or_several(tmp_path: Path) -> None:
    assert chosen_trackers(config(tmp_path)) == ("wandb",)
    assert chosen_trackers(config(tmp_path, "tracker=tensorboard")) == ("tensorboard",)
    assert chosen_trackers(config(tmp_path, "tracker=[trackio,wandb,trackio]")) == ("trackio", "wandb")
    assert chosen_trackers(config(tmp_path, "tracker=[wandb,tensorboard]", "wandb.mode=disabled")) == ("tensorboard",)
    assert chosen_trackers(config(tmp_path, "tracker=[]")) == ()
    with pytest.raises(ConfigError, match="tracker"):
        config(tmp_path, "tracker=comet")


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


class FakeRun:
    """wandb's run, as far as the tracker uses it."""

    id = "abc"

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.alerts: list[dict[str, str]] = []
        self.artefacts: list[Any] = []

    def log(self, point: dict[str, Any]) -> None:
        self.points.append(point)

    def alert(self, **fields: str) -> None:
        self.alerts.append(fields)

    def log_artifact(self, artefact: Any) -> None:
        self.artefacts.append(artefact)

    def finish(self) -> None: ...


def test_wandb_gets_tables_alerts_and_the_report_with_wandbs_own_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FakeRun()
    monkeypatch.setattr(wandb, "start_run", lambda *_: run)
    tracker = wandb.WandbTracker(SimpleNamespace(), tmp_path, "launcher")  # type: ignore[arg-type]
    tracker.log({"finetune/loss": 0.5}, step=7)
    tracker.alert("hack", "hack since step 3: look at the rollouts")
    tracker.table("launcher/rollouts", ("step", "text"), [[7, "hello"], [7, None]], step=8)
    (tmp_path / "report.html").write_text("<html></html>")
    tracker.keep(tmp_path / "report.html")

    assert run.points[0] == {"finetune/loss": 0.5, "launcher/step": 7}
    table = run.points[1]["launcher/rollouts"]
    assert (table.columns, table.data) == (["step", "text"], [[7, "hello"], [7, None]])
    assert run.alerts == [{"title": "hack", "text": "hack since step 3: look at the rollouts"}]
    (artefact,) = run.artefacts
    assert (artefact.type, list(artefact.manifest.entries)) == ("report", ["report.html"])


def test_a_tracker_that_is_not_installed_costs_nothing_but_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    logger = MetricsLogger(config(tmp_path, "tracker=tensorboard"), tmp_path, "finetune")
    logger.log({"loss": 1.0}, step=1)
    logger.close()
    assert "event=tracker_failed tracker=tensorboard" in caplog.text
    assert len(read_metrics(tmp_path, "finetune")) == 1
