"""The command's arguments and figures; `tests/integration/test_debug_modes.py` runs it."""

import json
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, validate
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import evaluate
from pipelinerl.launcher.evaluate import arguments_of, chosen_ks, evaluated, main, parser, table_lines

FOUND = {
    "outcomes": {"gsm8k": [[4, 1], [4, 4]], "math_500": [[4, 0]]},
    "metrics": {"complete": 1.0},
    "rollouts": 12,
    "reward": 0.5,
}


def test_settings_of_the_user_come_last_and_options_may_stand_between() -> None:
    args = parser().parse_intermixed_args(
        ["m", "eval.attempts=9", "--config-name=math", "--attempts", "4", "test_llm.parameters.temperature=0.6"]
    )
    line = arguments_of(args, Path("/tmp/a b"))
    assert line[:2] == ["--config-name=math", 'output_dir="/tmp/a b"']
    assert "eval.attempts=4" in line
    assert line[-2:] == ["eval.attempts=9", "test_llm.parameters.temperature=0.6"]


@pytest.mark.parametrize("keys", [("stage=sft", "sft.epochs=2", "sft.test_datasets=[b]"), ("sft.per_step=4",)])
def test_model_of_a_run_that_imitates_is_evaluated_by_its_own_configuration(keys: tuple[str, ...]) -> None:
    args = parser().parse_args(["m", "--config-name=quickstart"])
    settings = [one for one in arguments_of(args, Path("/tmp/x")) if not one.startswith("--")]
    validate(compose("quickstart", ["sft.datasets=[a]", *keys, *settings]))


def test_model_and_folder_may_have_any_name() -> None:
    args = parser().parse_intermixed_args(["/modèles/数学, v=1", "--config-name=math"])
    line = arguments_of(args, Path("/tmp/é"))
    assert {'output_dir="/tmp/é"', 'model_path="/modèles/数学, v=1"'} <= set(line)


@pytest.mark.parametrize(
    ("text", "attempts", "said"),
    [("2,8", 4, "at most --attempts=4"), ("0", 4, "at least 1"), ("x", 4, "write numbers"), (None, 0, "at least 1")],
)
def test_k_that_cannot_be_estimated_is_refused(text: str | None, attempts: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_ks(text, attempts)


def test_figures_are_those_of_each_data_set_and_of_all_problems() -> None:
    result = evaluated(FOUND, 4, [1, 2])
    rows = result["datasets"]
    assert list(rows) == ["gsm8k", "math_500", "all"]
    assert rows["gsm8k"]["pass@1"]["value"] == (1 / 4 + 1) / 2
    assert rows["gsm8k"]["pass@2"]["value"] == (1 / 2 + 1) / 2
    assert rows["all"]["pass@1"]["value"] == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert [row["problems"] for row in rows.values()] == [2, 1, 3]
    table = table_lines(result, [1, 2])
    assert table[0].split() == ["data", "set", "problems", "pass@1", "(95", "%)", "pass@2", "(95", "%)"]
    assert "0.625 (" in table[1]


def test_data_set_called_all_is_not_the_row_over_all() -> None:
    rows = evaluated(FOUND | {"outcomes": {"all": [[4, 1]], "other": [[4, 4]]}}, 4, [1])["datasets"]
    assert {name: row["problems"] for name, row in rows.items()} == {"all": 1, "other": 1, "all data sets": 2}


def test_json_prints_the_figures_as_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(evaluate, "launch", lambda arguments: 0)
    monkeypatch.setattr(evaluate, "read_debug_run", lambda folder: {"evaluation": FOUND})
    assert evaluate.main(["m", "--config-name=math", "--attempts=4", "--k=1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"model": "m", "config": "math", **evaluated(FOUND, 4, [1])}


def test_incomplete_evaluation_says_so() -> None:
    few = FOUND | {"outcomes": {"a": [[1, 1]]}, "metrics": {"complete": 0.25}}
    result = evaluated(few, 4, [1, 4])
    assert list(result["datasets"]) == ["a"]
    assert "pass@4" not in result["datasets"]["a"]
    assert table_lines(result, [1, 4])[1].rstrip().endswith("–")
    assert table_lines(result, [1, 4])[-1] == "only 25.0% of the attempts have a result"


def test_a_run_in_place_of_its_model_is_refused_with_its_newest_model(tmp_path: Path) -> None:
    for step in (80, 160, 9):
        (tmp_path / f"run/exports/step_{step}").mkdir(parents=True)
    args = parser().parse_args([str(tmp_path / "run")])
    with pytest.raises(ConfigError, match=r"but a run: its newest model is .*run/exports/step_160$"):
        arguments_of(args, tmp_path)


def test_a_model_that_a_run_does_not_have_is_refused_with_its_newest_one(tmp_path: Path) -> None:
    (tmp_path / "run/exports/step_80").mkdir(parents=True)
    (tmp_path / "run/conf").mkdir()
    (tmp_path / "run/conf/config.yaml").touch()
    args = parser().parse_args([str(tmp_path / "run/exports/step_90")])
    with pytest.raises(ConfigError, match=r"step_90' does not exist: the newest model of that run is .*/step_80$"):
        arguments_of(args, tmp_path)


def test_refusal_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["nowhere/model", "--config-name=nonexistent"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_dry_run_succeeds_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(evaluate, "launch", lambda arguments: 0)  # as a dry run: it starts nothing
    assert main(["m", "--config-name=math", "dry_run=true"]) == 0
    assert list(tmp_path.iterdir()) == []
