"""What the launcher tells trackers: alarms, tables of rollouts when they are due, and the report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, load_run, parse
from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.launcher.tracking import COLUMNS, RunTracking, sample_rows, token_text_of
from pipelinerl.observability import trackers
from tests.run_folder import GROUPS, Story, make_run

STEPS = 6


class FakeTracker:
    """Keeps what it is told. Takes the place of wandb."""

    def __init__(self, cfg: Any, run_dir: Path, kind: str):
        self.kind = kind
        self.alerts: list[tuple[str, str]] = []
        self.tables: list[tuple[str, list[str], list[list[Any]], int]] = []
        self.files: list[Path] = []
        self.finished = False
        MADE.append(self)

    def log(self, point: dict[str, float], step: int) -> None: ...

    def alert(self, title: str, text: str) -> None:
        self.alerts.append((title, text))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        self.tables.append((name, list(columns), [list(row) for row in rows], step))

    def keep(self, path: Path) -> None:
        self.files.append(path)

    def finish(self) -> None:
        self.finished = True


MADE: list[FakeTracker] = []


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(trackers.TRACKERS, "wandb", f"{__name__}.FakeTracker")
    monkeypatch.setattr(trackers, "resolve_function", lambda name: FakeTracker)
    overrides = ("wandb.mode=online", "wandb.sample_steps=2", "tracker=[wandb,tensorboard]")
    yield make_run(tmp_path / "run", Story(steps=STEPS, overrides=overrides))
    MADE.clear()


def test_alarms_tables_and_report_reach_the_trackers_that_take_text(run_dir: Path) -> None:
    told = RunTracking(load_run(run_dir), run_dir)
    told.alarm(Finding(Level.REWARD, "hack", "reward without success", "Read the rollouts", step=3))
    for step in (1, 2, 3, 5):
        told.step(step)
    told.keep(run_dir / "report.html")
    told.close()

    (tracker,) = MADE
    assert (tracker.kind, tracker.finished) == ("launcher", True)
    assert tracker.alerts == [("hack", "hack since step 3: reward without success. Read the rollouts")]
    assert tracker.files == [run_dir / "report.html"]
    assert [(name, step) for name, _, _, step in tracker.tables] == [("launcher/rollouts", 2), ("launcher/rollouts", 5)]
    assert all(columns == list(COLUMNS) for _, columns, _, _ in tracker.tables)
    assert {row[0] for _, _, rows, step in tracker.tables if step == 5 for row in rows} == {4}


def test_rows_are_the_rollouts_of_the_step_with_their_text(run_dir: Path) -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in sample_rows(run_dir, 4, token_text_of(run_dir))]
    assert {row["sample"].split("/")[0] for row in rows} <= {f"0-{4 * GROUPS + place}" for place in range(GROUPS)}
    assert 4 <= len(rows) <= 8
    assert all("largest of 18, 5 and 30" in row["text"] for row in rows)
    assert all(row["success"] == (row["reward"] == 1.0) for row in rows)
    assert rows[0]["flags"]
    assert sample_rows(run_dir, 99, token_text_of(run_dir)) == []


def test_without_trackers_nothing_is_started(tmp_path: Path) -> None:
    given = [f"output_dir={tmp_path}", "dataset_loader=a.b", "actor.rollout_policy=a.b", "wandb.mode=disabled"]
    told = RunTracking(parse(compose("base", given)), tmp_path)
    told.step(20)
    told.keep(tmp_path)
    told.close()
