"""The search for a width that balances the benchmark, and the recorded table from the recorded runs."""

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import schedules
from benchmarks.schedules_runs import Run
from benchmarks.schedules_task import WIDTH
from pipelinerl.world import Job

RECORDED = Path(schedules.__file__).with_suffix(".json")


@pytest.mark.parametrize("speed", [0.25, 0.5, 1.0, 2.0, 4.0])
def test_width_is_found_for_machines_that_decode_slower_or_faster(speed: float) -> None:
    """Decoding takes a fixed time and one by the width, training nearly all by the width; 1536 balances speed 1."""

    def ratio_of(width: int) -> float:
        return speed * (50 + width) / (50 + WIDTH) * (1000 + WIDTH) / (1000 + width)

    tried = schedules.find_width(ratio_of)
    width, ratio = tried[-1]
    assert ratio == ratio_of(width)
    reachable = ratio_of(schedules.WIDTHS[1]) > 1 > ratio_of(schedules.WIDTHS[0])
    assert not reachable or 1 / schedules.BALANCED <= ratio <= schedules.BALANCED
    assert len(tried) <= schedules.WIDTH_TRIES
    assert abs(math.log(ratio)) == min(abs(math.log(r)) for _, r in tried)
    if speed == 1.0:
        assert tried == [(WIDTH, 1.0)]


def test_recorded_table_is_that_of_the_recorded_runs() -> None:
    data = json.loads(RECORDED.read_text())
    recorded = data.pop("summary")
    assert schedules.summarise(data, data["target"]) == recorded


def recorded(seeds: tuple[str, ...] = ("5",)) -> dict[str, Any]:
    """What was recorded of the balanced runs with heavy-tailed lengths."""
    data = json.loads(RECORDED.read_text())
    return {
        "calibrations": {seed: data["calibrations"][seed] for seed in seeds},
        "runs": {row: {seed: data["runs"][row][seed] for seed in seeds} for row in schedules.RATIO_ROWS},
    }


def test_contention_slows_what_is_predicted_of_the_pipeline_alone() -> None:
    """With a trainer that is the narrow side: 1.5 times its time but what it does beside training."""
    data = recorded()
    data["calibrations"]["5"]["together"] = {"decode": 0.1, "train": 1.0}
    before = {schedule: schedules.predicted_step_s(data, "heavy", schedule) for schedule in schedules.SCHEDULES}
    assert schedules.predicted_ratio(data, "heavy") > 1
    beside_s = 64 * 40 * data["calibrations"]["5"]["beside_s_per_token"]
    data["calibrations"]["5"]["together"] = {"decode": 0.1, "train": 1.5}
    assert schedules.predicted_step_s(data, "heavy", "pipeline") == pytest.approx(
        1.5 * (before["pipeline"] - beside_s) + beside_s
    )
    for schedule in ("G=1", "G=8"):
        assert schedules.predicted_step_s(data, "heavy", schedule) == before[schedule]


def test_off_balance_is_reached_by_fewer_sequences_or_longer_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    data, model = recorded(), Path("model")
    monkeypatch.setattr(schedules.runs, "in_child", lambda function, *_: 25)  # tokens of a prompt
    ratio = schedules.predicted_ratio(data, "heavy")
    assert schedules.off_balance(data, 2 * ratio, model)["filler"] == 25 + 40
    fewer = schedules.off_balance(data, ratio / 2, model)
    assert fewer["filler"] == 0
    assert schedules.predicted_ratio(data | fewer | recorded(), "heavy") == pytest.approx(ratio / 2, rel=0.05)


class FakeRuns:
    """Stands for the processes: every run is the recorded one of its row."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, tuple[str, ...]]] = []

    def execute(self, run: Run, model: Path, folder: Path, server: Job) -> None:
        folder.mkdir(parents=True)
        self.rows.append((folder.name, run.filler, run.overrides))

    def measured(self, run: Run, model: Path, folder: Path) -> dict[str, Any]:
        (schedule,) = [name for name, keys in schedules.SCHEDULES.items() if keys == run.overrides[: len(keys)]]
        data = json.loads(RECORDED.read_text())
        return dict(data["runs"][f"{run.lengths} {schedule}"]["5"])

    def in_child(self, function: Callable[..., Any], *args: Any) -> Any:
        if function.__name__ == "prompt_length":
            return 25
        return {height: rate for height, rate in ((1, 50.0), (16, 700.0), (64, 1300.0)) if height in args[2]}

    @contextlib.contextmanager
    def running_server(self, model: Path, folder: Path) -> Iterator[Job]:
        yield Job(name="actor_llm_0", kind="actor_llm")

    def loaded(self, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(get=lambda kind: (Job(name="finetune_0", kind="finetune"),))


def test_measure_finds_the_width_then_runs_the_rows_and_those_off_balance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, path = FakeRuns(), tmp_path / "found.json"
    for name in ("execute", "measured", "in_child", "running_server"):
        monkeypatch.setattr(schedules.runs, name, getattr(fake, name))
    for name in ("environment", "preload"):
        monkeypatch.setattr(schedules.runs, name, lambda: None)
    monkeypatch.setattr(schedules.runs, "ensure_model", lambda folder, width: folder)
    monkeypatch.setattr(schedules.runs, "slowdown_together", lambda *_: {"decode": 1.0, "train": 1.0})
    monkeypatch.setattr(schedules, "WorldMap", SimpleNamespace(load=fake.loaded))
    monkeypatch.setattr(
        "sys.argv",
        ["schedules", "--seeds", "5", "--rows", *schedules.RATIO_ROWS, "--ratios", "0.5", "3", "--json", str(path)],
    )
    schedules.main()
    found = json.loads(path.read_text())
    assert found["width"] == found["tried_widths"][-1][0]
    assert found["tried_widths"][-1][1] < 1 / schedules.BALANCED, "in these recorded runs a width changes nothing"
    assert found["concurrency"] == 64
    assert found["filler"] == round((1 / found["tried_widths"][-1][1] - 1) * (25 + 40)) > 0
    assert sorted(found["runs"]) == sorted(schedules.RATIO_ROWS)
    names = [name for name, *_ in fake.rows if not name.startswith("calibration")]
    assert names == ["heavy-pipeline", "heavy-G1", "heavy-G8"] * 3
    half, threefold = (fake.rows[-1 - 4], fake.rows[-1])
    assert half[1] == found["filler"] < threefold[1]
    assert half[2][-2] != threefold[2][-2] == "actor.llm_max_rollouts=64"
    assert half[2][-1] == threefold[2][-1] == "finetune.seq_length=768"
    assert set(found["ratio_summary"]) == {"0.5", "3"}
    line = found["ratio_summary"]["0.5"]
    assert line["planners_choice"] in schedules.SCHEDULES
    pipeline, slow = (found["runs"][f"heavy {schedule}"]["5"]["step_ends_s"] for schedule in ("pipeline", "G=1"))
    assert line["times_the_pipelines"]["G=1"] == pytest.approx(
        (slow[15] - slow[7]) / (pipeline[15] - pipeline[7]), abs=0.01
    )
    assert "wanted  0.5" in capsys.readouterr().out
