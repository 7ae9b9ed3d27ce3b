import csv
import json

import pyarrow
import pyarrow.parquet
import pytest

from pipelinerl.domains.coding import load_problems as load_coding
from pipelinerl.domains.math import load_problems
from pipelinerl.errors import DomainError
from tests.says import says

ROWS = [{"problem": "1+1?", "answer": "2"}, {"problem": "Half of one?", "answer": "\\frac{1}{2}"}]


@pytest.fixture(params=["jsonl", "json", "csv", "parquet"])
def file(request, tmp_path):
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    elif request.param == "json":
        path.write_text(json.dumps(ROWS))
    elif request.param == "csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["problem", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def test_every_file_format_gives_the_same_problems(file):
    problems = load_problems([str(file)])
    assert [(p["task"], p["answer"], p["id"]) for p in problems] == [
        (r["problem"], r["answer"], i) for i, r in enumerate(ROWS)
    ]
    assert {p["dataset"] for p in problems} == {str(file)}


def test_columns_are_mapped_and_limited(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"q": f"{i}?", "a": i}) for i in range(5)))
    problems = load_problems([str(path)], columns={"task": "q", "answer": "a"}, max_problems=2)
    assert [(p["task"], p["answer"]) for p in problems] == [("0?", "0"), ("1?", "1")]


def test_globs_are_read_in_order(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"task": name, "answer": "1"}))
    assert [p["task"] for p in load_problems([str(tmp_path / "*.jsonl")])] == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["me@home", "a:b", "[1]", "my data", "数学", "*", "x.json", "a=b,c", "{x}", "100%", "#1?", "x.json:y@z"]
)
def test_file_is_found_whatever_its_folder_is_called(tmp_path, name):
    (tmp_path / name).mkdir()
    file = tmp_path / name / "rows.jsonl"
    file.write_text(json.dumps({"task": name, "answer": "1"}))
    for written in (f"{file}", f"{file}@train"):
        assert [(p["task"], p["dataset"]) for p in load_problems([written])] == [(name, written)]


@pytest.mark.parametrize("part", ["@test", ":main", ":main@train"])
def test_part_of_a_file_that_has_none_is_refused(tmp_path, part):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"task": "?", "answer": "1"}))
    with pytest.raises(DomainError, match=says(f"'{tmp_path}/rows.jsonl{part}'", "local file", f"'{part}'")):
        load_problems([f"{tmp_path}/rows.jsonl{part}"])


def test_answer_of_a_worked_solution_is_its_last_line(tmp_path):
    path = tmp_path / "gsm.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "1000 + 234 = <<1234>>\n#### 1,234"}))
    assert load_problems([str(path)])[0]["answer"] == "1234"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", r"x\.jsonl:1 is not JSON"),
        (json.dumps({"task": "?"}), "columns.answer"),
        (json.dumps({"text": "?", "answer": "1"}), "columns.task"),
        (json.dumps({"task": "?", "answer": " "}), says("x.jsonl", "row 0", "the answer is missing")),
        ("[1]", says("x.jsonl", "row 0", "list", "object")),
        ('"task, tests"', says("x.jsonl", "row 0", "str", "object")),
    ],
)
def test_bad_row_is_named(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(DomainError, match=message):
        load_problems([str(path)])


def test_bad_row_of_coding_problems_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("[1]")
    with pytest.raises(DomainError, match=says("row 0", "list", "object")):
        load_coding([str(path)])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b"{broken", "JSONDecodeError"),
        ("x.jsonl", b'{"task": "\xff", "answer": "1"}', "UnicodeDecodeError"),
        ("x.parquet", b"no parquet", "ArrowInvalid"),
        ("x.csv", b'task,answer\n"' + b"x" * 200_000 + b'",1\n', "field larger than field limit"),
        ("x.csv", b"q,a\n1,2,3\n", "columns.task"),
    ],
)
def test_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DomainError, match=message) as caught:
        load_problems([str(path)])
    assert str(path) in str(caught.value)


def test_byte_order_mark_is_no_part_of_a_column(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbfproblem,answer\n1+1?,2\n")
    assert [p["task"] for p in load_problems([str(path)])] == ["1+1?"]


def test_dataset_out_of_reach_is_named(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(DomainError, match=says("'openai/gsm8k:main'", "Couldn't reach")):
        load_problems(["openai/gsm8k:main"])


@pytest.mark.parametrize("name", ["http://host/rows.json", "s3://bucket/rows.jsonl", "hf://datasets/a/b"])
def test_address_of_another_kind_is_refused(name):
    with pytest.raises(DomainError, match=says(f"'{name}'", "https://")):
        load_problems([name])


def test_missing_file_is_named():
    with pytest.raises(DomainError, match="no such file"):
        load_problems(["nowhere/none.jsonl"])


def test_coding_tests_may_be_json_text_and_are_limited(tmp_path):
    path = tmp_path / "code.jsonl"
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["1\n", "4\n", "9\n"]}
    path.write_text(json.dumps({"question": "Square it.", "input_output": json.dumps(tests)}))
    (problem,) = load_coding([str(path)], max_tests=2)
    assert problem["tests"] == {"inputs": ["1\n", "2\n"], "outputs": ["1\n", "4\n"]}


@pytest.mark.parametrize(
    "tests",
    [
        {},
        {"inputs": [], "outputs": []},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [[1]], "outputs": [1], "fn_name": 3},
        {"inputs": ["[1]"], "outputs": [1], "fn_name": "f"},
        "no",
    ],
)
def test_unusable_coding_tests_are_named(tmp_path, tests):
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps({"task": "?", "tests": tests}))
    with pytest.raises(DomainError, match="row 0"):
        load_coding([str(path)])
