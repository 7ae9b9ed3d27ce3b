"""Conversations before the start: the steps of epochs, and what the user is told of the rows."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.launcher.conversations import check_conversations, steps_of
from tests.says import says

GOOD = {"prompt": "hi", "completion": "ho"}


def config(folder: Path, rows: list[dict[str, Any]], *overrides: str) -> Config:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ("stage=sft", f"output_dir={folder}", f"sft.datasets=[{folder / 'rows.jsonl'}]")
    batch = ("finetune.train_batch_size=4", "finetune.gradient_accumulation_passes=4")
    return parse(compose("base", [*own, *batch, *overrides]))


@pytest.mark.parametrize(("epochs", "steps"), [(1, 38), (2, 75), (0.01, 1), (1.5, 57)])
def test_epochs_of_600_rows_in_steps_of_16(tmp_path: Path, epochs: float, steps: int) -> None:
    """37.5 steps an epoch. Rows that are left out do not count."""
    rows = [*[GOOD] * 600, *[GOOD | {"weight": 0}] * 70, *[{"prompt": "hi"}] * 20]
    assert steps_of(config(tmp_path, rows, f"sft.epochs={epochs}"), ["seed=1"]) == steps


def test_epochs_and_steps_on_the_command_line_are_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, [GOOD], "sft.epochs=2")
    with pytest.raises(ConfigError, match=says("sft.epochs", 2, "finetune.max_train_steps=9")):
        steps_of(cfg, ["finetune.max_train_steps=9"])


def test_check_says_what_is_left_out_and_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    (note,) = check_conversations(config(tmp_path, [*[GOOD] * 19, {"prompt": "hi", "completion": " "}]))
    assert "left out 1 rows" in note
    missing = tmp_path / "missing.jsonl"
    with pytest.raises(DomainError, match=says("missing.jsonl", "no such file")):
        check_conversations(config(tmp_path, [GOOD], f"sft.test_datasets=[{missing}]"))
