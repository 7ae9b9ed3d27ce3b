import csv
import gzip
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from pipelinerl.domains.coding import load_problems as load_coding
from pipelinerl.domains.datasets import rows_of
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
        ("x.jsonl", b'{"task": "\xff", "answer": "1"}', "UnicodeDecodeError.*save it as UTF-8"),
        ("x.parquet", b"no parquet", "ArrowInvalid"),
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


def written_as(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def tasks_of(name):
    return [problem["task"] for problem in load_problems([name])]


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
TABLE = 'problem,answer\n1+1?,2\nHalf of one?,"\\frac{1}{2}"\n'
SEEN = ["1+1?", "Half of one?"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.ndjson", LINES),
        ("X.JSONL", LINES),
        ("x.json", LINES),
        ("x.json", "\ufeff\n" + LINES),
        ("x.tsv", TABLE.replace(",", "\t")),
        ("x.jsonl.gz", LINES),
        ("x.ndjson.gz", LINES),
        ("x.json.gz", LINES),
        ("x.json.gz", json.dumps(ROWS)),
        ("x.csv.gz", "\ufeff" + TABLE),
        ("x.tsv.gz", TABLE.replace(",", "\t")),
        ("x.json", json.dumps({"data": ROWS, "version": 1})),
        ("x.json", json.dumps({"rows": ROWS}, indent=1)),
        ("x.json", json.dumps({"train": ROWS, "test": [{"problem": "3?", "answer": "3"}]})),
    ],
)
def test_other_forms_give_the_same_problems(tmp_path, name, text):
    assert tasks_of(written_as(tmp_path / name, text)) == SEEN


def test_arrow_files_are_read(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(f"{tmp_path}/x.arrow", "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    assert tasks_of(f"{tmp_path}/x.arrow") == SEEN


def test_json_file_of_one_object_is_one_row_and_its_parts_have_names(tmp_path):
    assert tasks_of(written_as(tmp_path / "one.json", json.dumps(ROWS[0], indent=1))) == ["1+1?"]
    parts = written_as(tmp_path / "parts.json", json.dumps({"train": ROWS, "validation": ROWS[:1]}))
    assert tasks_of(f"{parts}@val") == ["1+1?"]
    with pytest.raises(DomainError, match=says("parts.json", "['train', 'validation']", "'test'")):
        load_problems([f"{parts}@test"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl.gz", gzip.compress((LINES * 100).encode())[:-20], "EOFError"),
        ("x.jsonl.gz", LINES.encode(), "Not a gzipped file"),
        ("x.json", b"3", says("row 0", "int", "object")),
        ("x.jsonl.zst", b"", "is not a data file: its name must end in"),
        ("x.arrow", b"no arrow", "Arrow"),
    ],
)
def test_other_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DomainError, match=message) as caught:
        load_problems([f"{tmp_path}/{name}"])
    assert name in str(caught.value)


@pytest.mark.parametrize("text", [json.dumps(ROWS), json.dumps({"data": ROWS})])
def test_split_of_a_json_file_that_has_none_is_refused(tmp_path, text):
    name = written_as(tmp_path / "x.json", text)
    with pytest.raises(DomainError, match=says("x.json", "one part, `train`", "'@test'")):
        load_problems([f"{name}@test"])


def test_row_with_more_cells_than_columns_is_left_out(tmp_path, caplog):
    good = "".join(f"{i}+1?,{i + 1},\n" for i in range(20))  # an empty cell too many is harmless
    name = written_as(tmp_path / "x.csv", f"problem,answer\n{good}1, 2 or 3?,2\n")
    assert tasks_of(name) == [f"{i}+1?" for i in range(20)]
    assert re.search(says("1 rows", "`task`", "row 20", "cells behind the last column"), caplog.text)


def test_folder_is_read_whole_and_what_is_left_out_is_named(tmp_path, caplog):
    written_as(tmp_path / "d/a.jsonl", LINES)
    written_as(tmp_path / "d/more/b.jsonl.gz", json.dumps({"problem": "3?", "answer": "3"}))
    for other in ("README.md", ".hidden.jsonl", "_SUCCESS", "dataset_info.json"):
        written_as(tmp_path / "d" / other, "?")
    for written in (f"{tmp_path}/d", f"{tmp_path}/d/", f"{tmp_path}/d@train"):
        caplog.clear()
        assert tasks_of(written) == [*SEEN, "3?"]
        assert f"event=files_left_out dataset={written} read=2 left_out=['README.md']" in caplog.text


def test_folder_with_files_of_several_splits_gives_one_split(tmp_path, caplog):
    written_as(tmp_path / "data/train-00000-of-00001.jsonl", LINES)
    written_as(tmp_path / "data/test-00000-of-00001.jsonl", json.dumps({"problem": "3?", "answer": "3"}))
    assert tasks_of(f"{tmp_path}/data") == SEEN
    assert "left_out=['test-00000-of-00001.jsonl']" in caplog.text
    assert tasks_of(f"{tmp_path}/data@test") == ["3?"]
    with pytest.raises(DomainError, match=says("validation", "['test', 'train']")):
        load_problems([f"{tmp_path}/data@valid"])


def test_folder_that_is_a_test_set_is_read_without_naming_the_split(tmp_path):
    written_as(tmp_path / "gsm8k/test.jsonl", LINES)
    assert tasks_of(f"{tmp_path}/gsm8k") == SEEN


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["a.jsonl", "b.csv"], says("files of several forms", "csv, jsonl", "name its files")),
        (["README.md"], says("no file that ends in", ".jsonl")),
        ([], says("no file that ends in", ".jsonl")),
    ],
)
def test_folder_of_mixed_files_or_none_is_refused(tmp_path, files, message):
    (tmp_path / "d").mkdir()
    for file in files:
        written_as(tmp_path / "d" / file, "?")
    with pytest.raises(DomainError, match=message):
        load_problems([f"{tmp_path}/d"])


def test_folder_without_a_slash_is_no_guess(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written_as(tmp_path / "rows/a.jsonl", LINES)
    assert tasks_of("./rows") == tasks_of("rows/") == SEEN
    with pytest.raises(DomainError, match=says("rows", "./rows")):
        load_problems(["rows"])
    for missing in ("./nowhere", "/no/where/", "./nowhere/*"):
        with pytest.raises(DomainError, match="no such file or folder"):
            load_problems([missing])


def test_table_loses_the_keys_that_other_rows_have_and_json_keeps_its_nulls(tmp_path):
    rows = [{"call": {"city": "Paris"}, "answer": None}, {"call": {"zip": "10115"}, "answer": "1"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    assert list(rows_of(f"{tmp_path}/x.parquet", True)) == rows
    real = {"call": {"city": None}}
    assert list(rows_of(written_as(tmp_path / "x.jsonl", json.dumps(real)), True)) == [real]


def test_columns_of_one_name_are_refused(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("problem,answer,answer\n1+1?,2,3\n")
    columns = pyarrow.Table.from_arrays([pyarrow.array([text]) for text in ("1+1?", "2", "3")], ["problem", "a", "a"])
    pyarrow.parquet.write_table(columns, tmp_path / "rows.parquet")
    for file, name in ((table, "answer"), (tmp_path / "rows.parquet", "a")):
        with pytest.raises(DomainError, match=f"{file.name} has several columns of the name '{name}'"):
            list(rows_of(str(file), True))


def test_quote_that_is_not_closed_is_refused_and_swallows_no_rows(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('problem,answer\n1+1?,"2\n2+2?,4\n')
    with pytest.raises(DomainError, match="unexpected end of data; close its quotes"):
        list(rows_of(str(path), True))


def test_long_cell_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"problem,answer\n{'x' * 200_000},4\n")
    assert [len(row["problem"]) for row in rows_of(str(path), True)] == [200_000]


def test_too_deep_json_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + "[" * 100_000)
    with pytest.raises(DomainError, match=r"rows\.jsonl:2 is not JSON that can be read: maximum recursion depth"):
        list(rows_of(str(path), True))


@pytest.mark.parametrize("name", ["rows.txt", "rows@test", "rows.*", "rows.txt@test"])
def test_local_name_that_is_not_data_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DomainError, match=says(name, f"./{name}")):
        list(rows_of(name, True))
