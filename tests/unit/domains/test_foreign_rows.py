"""Rows of other trainers: the examples of the guide are read, and what is no question is refused by name."""

import json
import math
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from omegaconf import OmegaConf

from examples.tool_use.domain import load_problems as load_tools
from pipelinerl.domains.coding.rollouts import load_problems as load_coding
from pipelinerl.domains.columns import answer_of, question_of
from pipelinerl.domains.math import load_problems
from pipelinerl.domains.rows import UnusableRow
from pipelinerl.domains.single_turn import conversation
from pipelinerl.errors import DomainError

PAGE = (Path(__file__).resolve().parents[3] / "docs/guides/your-data.md").read_text()
EXAMPLE = re.compile(r"```json (\S+)\n(.*?)```\n\n```yaml\n(.*?)```", re.DOTALL)
DOMAINS_OWN = {"role": "system", "content": "of the domain"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


EXPECTED = {
    "verl.parquet": [([DOMAINS_OWN, user("What is 6 × 7? Let's think step by step.")], "42")],
    "trl.jsonl": [
        ([{"role": "system", "content": "Answer in a box."}, user("What is 6 × 7?")], "42"),
        ([DOMAINS_OWN, user("What is 2 + 2?")], "4"),
    ],
    "verifiers.jsonl": [([DOMAINS_OWN, user("What is 6 × 7?")], "42")],
    "openai.jsonl": [([{"role": "system", "content": "You calculate."}, user("What is 6 × 7?")], "42")],
}


def test_examples_of_the_page_are_asked_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {}
    for name, lines, keys in EXAMPLE.findall(PAGE):
        rows = [json.loads(line) for line in lines.splitlines()]
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
        else:
            Path(name).write_text(lines)
        config = yaml.safe_load(keys)
        problems = load_problems(config["train_dataset_names"], **config.get("dataset_loader_params", {}))
        asked = [conversation(OmegaConf.create({}), problem["task"], "of the domain") for problem in problems]
        found[name] = [(messages, problem["answer"]) for messages, problem in zip(asked, problems, strict=True)]
    assert found == EXPECTED


def test_template_applies_to_the_last_message_and_system_prompt_to_messages_without_one() -> None:
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    cfg = OmegaConf.create({"actor": {"system_prompt": "s", "task_template": "<{task}>"}})
    assert conversation(cfg, messages) == [{"role": "system", "content": "s"}, *messages[:2], user("<c>")]


def test_tests_of_verls_coding_rows(tmp_path: Path) -> None:
    row = {
        "prompt": [user("Add two numbers.")],
        "reward_model": {"ground_truth": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})},
    }
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    (problem,) = load_coding([str(tmp_path / "x.jsonl")])
    assert (problem["task"], problem["tests"]["outputs"]) == ([user("Add two numbers.")], ["3\n"])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"text": "?"}, "neither a text nor a list of messages: column `prompt` is dict {'text': '?'}"),
        (["?"], "neither a text nor a list of messages"),
        (3, "is int 3"),
        ([{"role": "human", "content": "?"}], "has one of role 'human'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "file"}]}], "only role, text and name are read"),
        (None, "the question is missing: column `prompt` is NoneType None"),
        (math.nan, "the question is missing"),
        (" ", "the question is missing"),
        ("a \ud83d b", "a text with half a character: column `prompt` holds '\\ud83d'"),
        ("<image>How tall is it?", "has images, videos or sounds"),
        ([user("Area? ![](https://cdn.example.org/a.png)")], "has images, videos or sounds"),
        ("Area? ![](figures/1.PNG)", "has images, videos or sounds"),
        (r"\includegraphics{a}", "has images, videos or sounds"),
        ([{"role": "user", "content": "?", "tool_calls": []}], "only role, text and name are read"),
        ([{"role": "assistant", "content": "!"}], "no message before the answer"),
    ],
)
def test_row_without_a_question_is_refused_with_its_column(value: Any, said: str) -> None:
    with pytest.raises(DomainError) as refusal:
        question_of({"prompt": value}, None)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("row", "name", "said"),
    [
        ({"answer": {"value": 3}}, None, "column `answer` is dict {'value': 3}"),
        ({"answer": True}, None, "neither a text nor a number: column `answer` is bool True"),
        ({"answer": None}, None, "the answer is missing: column `answer` is NoneType None"),
        ({"answer": math.nan}, None, "the answer is missing"),
        ({"answer": Decimal("NaN")}, None, "the answer is missing"),
        ({"answer": math.inf}, None, "neither a text nor a number"),
        ({"answer": ["42", "43"]}, None, "`answer.0` for the first of a list"),
        ({"answer": "  "}, None, "the answer is missing"),
        (
            {"messages": [{"role": "user", "content": "?"}]},
            None,
            "the last message of column `messages` has role 'user'",
        ),
        ({"prompt": "?"}, None, "set dataset_loader_params.columns.answer"),
        ({"info": "{"}, "info.gold", "not 'info.gold'"),
        ({"list": [1]}, "list.1", "not 'list.1'"),
    ],
)
def test_row_without_an_answer_is_refused_with_its_column(row: dict[str, Any], name: str | None, said: str) -> None:
    with pytest.raises(DomainError) as refusal:
        answer_of(row, name)
    assert said in str(refusal.value)


def test_dotted_names_go_into_objects_lists_and_json_and_a_whole_name_comes_first() -> None:
    row = {"a": '{"b": [1, {"c": 2.5}]}', "a.b": 7}
    assert answer_of(row, "a.b.1.c") == "2.5"
    assert answer_of(row, "a.b") == "7"


@pytest.mark.parametrize(
    ("column", "value", "is_left_out"),
    [
        ("images", [{"bytes": b"x", "path": None}], True),
        ("image", "figure.png", True),
        ("img", {"bytes": b"x"}, True),
        ("figure_path", "1.png", True),
        ("decoded_image", {"bytes": b"x"}, True),
        ("image_2", [1], True),
        ("videos", ["a.mp4"], True),
        ("images", [], False),
        ("images", None, False),
        ("images", [{"bytes": None, "path": None}], False),
        ("image", math.nan, False),
        ("imagery", "rich", False),
    ],
)
def test_question_of_a_row_with_an_image_is_refused(column: str, value: Any, is_left_out: bool) -> None:
    row = {"prompt": "How tall is it?", column: value}
    if is_left_out:
        with pytest.raises(UnusableRow, match=f"has images.*column `{column}`"):
            question_of(row, None)
    else:
        assert question_of(row, None) == "How tall is it?"


def test_html_in_a_question_is_no_image() -> None:
    assert question_of({"prompt": "What does <img src=x> do?"}, None) == "What does <img src=x> do?"


def test_messages_in_a_text_column_are_messages_and_another_list_stays_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("a")]
    assert question_of({"prompt": json.dumps(messages)}, None) == messages
    for text in ('[{"role": "admin", "content": "a"}]', '[{"role": "user"}]', "[1, 2]", "[x", "[]"):
        assert question_of({"prompt": text}, None) == text


@pytest.mark.parametrize(
    "choices",
    [{"choices": ["0", "4"]}, {"options": {"text": ["3", "5"], "label": ["A", "B"]}}, {"options": "A) 3 B) 5"}],
)
def test_question_whose_choices_stand_in_another_column_is_left_out(choices: dict[str, Any]) -> None:
    with pytest.raises(UnusableRow, match=r"the question lacks its choices: column `(choices|options)` is"):
        question_of({"question": "Which is even?", **choices}, None)


def test_question_with_its_choices_is_kept() -> None:
    text = "Which is even?\nA. three\n\nB. number  4"
    assert (
        question_of({"question": text, "choices": {"text": ["three", "number 4"], "label": ["A", "B"]}}, None) == text
    )
    assert question_of({"question": "x", "choices": [], "options": None}, None) == "x"


@pytest.mark.parametrize(
    ("load", "params", "message"),
    [
        (
            load_problems,
            {"columns": {"tsk": "question"}},
            r"columns\.tsk` is not a field of this domain: \['task', 'answer'\]",
        ),
        (
            load_coding,
            {"columns": {"answer": "a"}},
            r"columns\.answer` is not a field of this domain: \['task', 'tests'\]",
        ),
        (load_problems, {"columns": {"task": 5}}, "it must be an object, field: column"),
        (load_problems, {"columns": ["task"]}, "it must be an object, field: column"),
        (load_problems, {"max_problems": -1}, "max_problems` is -1: it must be at least 1"),
        (load_problems, {"max_left_out": float("nan")}, "max_left_out` is nan: it must be a share from 0 to 1"),
        (load_tools, {"columns": {"tsk": "question"}}, r"columns\.tsk` is not a field"),
        (load_coding, {"max_tests": 0}, "max_tests` is 0: it must be at least 1"),
    ],
)
def test_parameter_without_effect_is_refused(tmp_path: Path, load: Any, params: dict[str, Any], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "6 x 7?", "answer": "42", "tests": {"inputs": ["1"], "outputs": ["2"]}}\n')
    with pytest.raises(DomainError, match=message):
        load([str(path)], **params)


@pytest.mark.parametrize(
    ("answer", "fix"),
    [(["42"], "`answer.0` for the first of a list"), ({"value": 42}, "`answer.value`"), (True, "write it as a text")],
)
def test_answer_of_another_kind_is_left_out_with_the_fix(answer: Any, fix: str) -> None:
    with pytest.raises(UnusableRow, match=re.escape(fix)):
        answer_of({"answer": answer}, None)
