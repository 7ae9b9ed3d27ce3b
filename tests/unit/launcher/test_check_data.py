"""`pipelinerl check`: what it prints and its exit code, for files, for experiments, and for what cannot be read."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import EXIT_REFUSED, PipelineRLError
from pipelinerl.launcher.check_data import main

GOOD = [{"problem": f"{index} + 1?", "answer": index + 1} for index in range(9)]
PROOF = {"problem": "Prove it.", "answer": "proof"}


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents: dict[str, list[dict[str, Any]]] = {
        "good": GOOD,
        "nearly": [*GOOD, PROOF],
        "bad": [*GOOD[:1], PROOF],
        "none": [],
    }
    for name, content in contents.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


def test_rows_left_out_are_printed_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["good.jsonl", "nearly.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "math: good.jsonl: 9 rows kept, 0 left out",
        "math: nearly.jsonl: 9 rows kept, 1 left out",
        "  1 rows: the answer is a placeholder (row 9: 'proof')",
    ]


def test_set_that_a_run_would_refuse_is_refused_and_the_next_one_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bad.jsonl", "none.jsonl", "nowhere.jsonl", "good.jsonl", "--json"]) == EXIT_REFUSED
    bad, none, nowhere, good = json.loads(capsys.readouterr().out)
    assert (bad["kept"], bad["left_out"]) == (1, 1)
    assert bad["reasons"] == [{"reason": "the answer is a placeholder", "rows": 1, "first": "row 1: 'proof'"}]
    assert "1 of 2 rows cannot be used" in bad["refusal"]
    assert none["refusal"] == "dataset 'none.jsonl' has no problem"
    assert nowhere["refusal"] == "dataset 'nowhere.jsonl': no such file or folder"
    assert good == {
        "domain": "math", "dataset": "good.jsonl", "kept": 9, "left_out": 0, "reasons": [], "refusal": None
    }  # fmt: skip
    assert main(["bad.jsonl", "--max-left-out", "0.5"]) == 0


def test_columns_and_domain_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.jsonl").write_text(json.dumps({"q": "1 + 1?", "a": "2"}))
    assert main(["own.jsonl"]) == EXIT_REFUSED
    assert "set dataset_loader_params.columns.task" in capsys.readouterr().out
    for name in ("math", "examples.judged.domain.load_problems", "pipelinerl.domains.math.load_problems"):
        assert main(["--as", name, "own.jsonl", "--column", "task=q", "--column", "answer=a"]) == 0
    assert main(["--as", "no.such.loader", "own.jsonl"]) == EXIT_REFUSED
    assert "`no.such.loader` cannot be imported" in capsys.readouterr().out


def test_data_sets_of_an_experiment_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["train_dataset_names=[nearly.jsonl]", "test_dataset_names=[good.jsonl]"]
    assert main(["--config-name=math", *chosen]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines if "kept" in line] == [
        "nearly.jsonl: 9 rows kept, 1 left out",
        "good.jsonl: 9 rows kept, 0 left out",
    ]
    assert main(["--config-name=quickstart"]) == 0
    assert "largest: test: 512 problems" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a data set"),
        (["--config-name=nothing"], "nothing"),
        (["--config-name=math", "--column=task=q"], "no effect with --config-name"),
        (["--as=sft", "good.jsonl", "--column=task=q"], "no effect with --as sft"),
    ],
)
def test_call_without_data_is_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(PipelineRLError, match=said):
        main(arguments)


def test_conversations_to_imitate_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    said = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]} for text in "abc"]
    said.append({"messages": [{"role": "user", "content": "?"}]})
    Path("talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    assert main(["--as", "sft", "talk.jsonl"]) == EXIT_REFUSED
    assert "sft.max_left_out" in capsys.readouterr().out
    assert main(["--as", "sft", "talk.jsonl", "--max-left-out=0.5"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "sft: talk.jsonl: 3 rows kept, 1 left out"
    assert second.startswith("  1 rows: no message has the role assistant (row 3")
    assert main(["--config-name=quickstart", "stage=sft", "sft.datasets=[talk.jsonl]", "sft.max_left_out=0.5"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("/talk.jsonl: 3 rows kept, 1 left out")
