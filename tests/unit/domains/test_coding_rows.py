"""Rows of code sets in the forms that they were published with, and rows that cannot be judged."""

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipelinerl.domains.coding import load_problems
from pipelinerl.domains.coding.judge import TestSuite
from pipelinerl.domains.json_text import dump, parse
from pipelinerl.errors import DomainError
from tests.says import says

GOOD = {"question": "Square.", "tests": {"inputs": ["2"], "outputs": ["4"]}}
DIGITS = "9" * 5000


def load(folder: Path, *rows: Any, **params: Any) -> list[dict[str, Any]]:
    """Loads rows, which are values or the text of JSON."""
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return load_problems([str(path)], **params)


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def live_code(private: Any) -> dict[str, Any]:
    """A row in LiveCodeBench's columns."""
    return {
        "question_title": "Sum",
        "question_content": "Add k to the sum.",
        "platform": "leetcode",
        "starter_code": "class Solution:\n    def add(self, a: List[int], k: int) -> int:\n        ",
        "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]),
        "private_test_cases": private,
        "metadata": json.dumps({"func_name": "add"}),
    }


MBPP = {
    "task_id": 2,
    "text": "Find the shared elements.",
    "code": "def similar(a, b):\n    return tuple(set(a) & set(b))",
    "test_list": ["assert set(similar((3, 4), (4, 5))) == set((4,))", "assert similar((1,), (1,)) == (1,)"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef near(numbers: List[float], t: float) -> bool:\n    """Whether …"""\n',
    "canonical_solution": "    return False\n",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1.0], 0.3) == False, 'no'\n"
    "    assert True\n\ncheck(near)",
    "entry_point": "near",
}


def test_private_and_public_tests_of_livecodebench_count_and_its_starter_code_is_shown(tmp_path: Path) -> None:
    private = json.dumps([{"input": "[]\n1", "output": "1", "testtype": "functional"}])
    for column in (private, packed(private), packed(private.encode())):
        (problem,) = load(tmp_path, live_code(column))
        assert problem["tests"] == {"inputs": ["[1, 2]\n3", "[]\n1"], "outputs": ["6", "1"], "fn_name": "add"}
        assert problem["task"].startswith("Add k to the sum.")
        assert "class Solution:\n    def add(self, a: List[int]" in problem["task"]


def test_standard_input_of_livecodebench(tmp_path: Path) -> None:
    case = {"input": "2\n", "output": "4\n", "testtype": "stdin"}
    row = live_code("[]") | {"public_test_cases": json.dumps([case]), "metadata": "{}", "starter_code": ""}
    (problem,) = load(tmp_path, row)
    assert problem["tests"] == {"inputs": ["2\n"], "outputs": ["4\n"]}
    assert problem["task"] == "Add k to the sum."


def test_pickle_with_more_than_text_runs_nothing(tmp_path: Path) -> None:
    class Call:
        def __reduce__(self) -> Any:
            return Path(tmp_path / "ran").touch, ()

    for value, said in ((Call(), "asks for"), ([1], "list")):
        with pytest.raises(DomainError, match=says("row 0", "pickled text", said)):
            load(tmp_path, live_code(packed(value)))
    assert not (tmp_path / "ran").exists()


def test_assertions_of_mbpp_become_calls_and_checks(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, MBPP)
    assert "similar((3, 4), (4, 5))" in problem["task"]
    assert problem["tests"]["fn_name"] == "similar"
    first, second = TestSuite.from_problem(problem["tests"]).tests
    assert (json.loads(first.stdin), first.expected) == (
        ["similar((3, 4), (4, 5))"],
        "assert set(_values[0]) == set((4,))",
    )
    assert (json.loads(second.stdin), second.expected) == (["similar((1,), (1,))"], "assert _values[0] == (1,)")
    (method,) = TestSuite.from_problem({"asserts": ["assert len(S(1).f(2)[0]) == 3"], "fn_name": "S"}).tests
    assert (json.loads(method.stdin), method.expected) == (["S(1).f(2)"], "assert len(_values[0][0]) == 3")
    sanitized = {
        "prompt": "Area.",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(area(1), 3.14, rel_tol=0.01)", "assert isinstance(area(2), float)"],
    }
    (problem,) = load(tmp_path, sanitized, max_tests=1)
    assert problem["tests"] == {
        "asserts": ["assert math.isclose(area(1), 3.14, rel_tol=0.01)"],
        "fn_name": "area",
        "setup": "import math",
    }


def test_assertions_of_humaneval_name_the_function(tmp_path: Path) -> None:
    (problem,) = load(tmp_path, HUMAN_EVAL)
    assert problem["tests"] == {
        "asserts": ["assert near([1.0], 0.3) == False, 'no'"],
        "fn_name": "near",
        "setup": "METADATA = {}",
    }


@pytest.mark.parametrize(
    ("tests", "read"),
    [
        ([{"type": "stdin_stdout", "input": "2", "output": "4"}], {"inputs": ["2"], "outputs": ["4"]}),
        (
            [{"type": "function_call", "fn_name": "f", "input": [2, [3]], "output": [4]}],
            {"inputs": ["2\n[3]"], "outputs": ["[4]"], "fn_name": "f", "unwrap": True},
        ),
        ({"inputs": [["a", "b"]], "outputs": [5]}, {"inputs": ["a\nb"], "outputs": ["5"]}),
        (
            {"inputs": [[2**70]], "outputs": [[2**71]], "fn_name": "f"},
            {"inputs": [str(2**70)], "outputs": [f"[{2**71}]"], "fn_name": "f", "unwrap": True},
        ),
        (
            {"inputs": [[]], "outputs": [None], "fn_name": "f"},
            {"inputs": [""], "outputs": ["null"], "fn_name": "f", "unwrap": True},
        ),
        (
            ["assert Solution().f(1) == g"],
            {"asserts": ["assert Solution().f(1) == g"], "fn_name": "Solution", "setup": ""},
        ),
        (["assert f(1) == 2"], {"asserts": ["assert f(1) == 2"], "fn_name": "f", "setup": ""}),
    ],
)
def test_tests_become_texts_that_a_message_can_hold(tmp_path: Path, tests: Any, read: Any) -> None:
    for column in (tests, json.dumps(tests), {"tests": json.dumps(tests)}):
        (problem,) = load(tmp_path, {"question": "?", "tests": column})
        assert problem["tests"] == read
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(problem)) == problem


def test_integer_of_many_digits_keeps_them(tmp_path: Path) -> None:
    calls = f'{{"inputs": [[{DIGITS}, "{DIGITS}"]], "outputs": [[-{DIGITS}]], "fn_name": "f"}}'
    for tests in (calls, json.dumps(calls)):
        (problem,) = load(tmp_path, f'{{"question": "?", "tests": {tests}}}')
        assert problem["tests"]["inputs"] == [f'{DIGITS}\n"{DIGITS}"']
        assert problem["tests"]["outputs"] == [f"[-{DIGITS}]"]
    (problem,) = load(tmp_path, f'{{"question": "?", "tests": {{"inputs": [{DIGITS}], "outputs": [{DIGITS}]}}}}')
    assert problem["tests"] == {"inputs": [DIGITS], "outputs": [DIGITS]}


@pytest.mark.timeout(60)
def test_integer_of_many_digits_is_read_in_time_in_proportion_to_them() -> None:
    text = f"[{'9' * 1_000_000}, -1]"
    value = parse(text)
    assert value[1] == -1
    assert dump(value) == text


UNUSABLE = {
    "no column": ({"question": "?"}, ["no tests", "question"]),
    "null": ({"question": "?", "tests": None}, ["no tests"]),
    "nan": ('{"question": "?", "input_output": NaN}', ["no tests"]),
    "empty text": ({"question": "?", "input_output": " "}, ["no tests"]),
    "empty lists": ({"question": "?", "tests": {"inputs": [], "outputs": []}}, ["no tests"]),
    "empty list": ({"question": "?", "test_list": []}, ["no tests"]),
    "no task": ({"question": None, "tests": GOOD["tests"]}, ["question is missing"]),
    "broken JSON": ({"question": "?", "tests": '{"inputs": ["1"'}, ["cannot be used"]),
    "no output": ({"question": "?", "tests": {"inputs": ["1"], "outputs": [None]}}, ["without an output"]),
    "a number": ({"question": "?", "tests": 5}, ["no known form", "int 5"]),
    "cases without outputs": ({"question": "?", "tests": [{"input": "1"}]}, ["no known form", "input"]),
    "one output too few": ({"question": "?", "tests": {"inputs": ["1", "2"], "outputs": ["1"]}}, ["same length"]),
    "broken arguments": (
        {"question": "?", "tests": {"inputs": ["[1"], "outputs": ["1"], "fn_name": "f"}},
        ["cannot be used"],
    ),
    "a call without a name": (live_code("[]") | {"metadata": "{}", "starter_code": ""}, ["without its name"]),
    "pytest": ({"question": "?", "test": "from solution import f\ndef test_f():\n    assert f(1)"}, ["not assertions"]),
    "a loop": (HUMAN_EVAL | {"test": "def check(f):\n    for i in (1, 2):\n        assert f(i)"}, ["not assertions"]),
    "an empty check": (HUMAN_EVAL | {"test": "def check(f):\n    assert True"}, ["no assertion about 'near'"]),
    "a comprehension": ({"text": "?", "test_list": ["assert all(f(i) == i for i in (1, 2))"]}, ["plainly"]),
    "no common function": ({"text": "?", "test_list": ["assert f(1)", "assert g(1)"]}, ["every assertion"]),
    "no Python": ({"text": "?", "test_list": ["assert f(1"]}, ["not Python"]),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_row_that_cannot_be_judged_is_left_out_and_the_others_are_kept(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    row, said = UNUSABLE[kind]
    problems = load(tmp_path, *[GOOD] * 5, row, *[GOOD] * 4)
    assert [problem["id"] for problem in problems] == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert len(caplog.messages) == 1
    assert all(word in caplog.messages[0] for word in [*said, "row 5", "1 rows"])


def test_more_rows_left_out_than_allowed_are_refused(tmp_path: Path) -> None:
    rows = [GOOD, GOOD | {"tests": None}]
    with pytest.raises(DomainError, match=says("1 of 2", "no tests", "row 1", "dataset_loader_params.max_left_out")):
        load(tmp_path, *rows)
    assert len(load(tmp_path, *rows, max_left_out=0.5)) == 1


def test_tests_of_codecontests_count_together(tmp_path: Path) -> None:
    row = {"description": "Double.", "language": None, "public_tests": {"input": ["1"], "output": ["2"]}}
    row |= {
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["2", "3"], "output": ["4", "6"]},
    }
    (problem,) = load(tmp_path, row)
    assert problem["task"] == "Double."
    assert problem["tests"] == {"inputs": ["1", "2", "3"], "outputs": ["2", "4", "6"]}
    with pytest.raises(DomainError, match="the tests cannot be used"):
        load(tmp_path, row | {"private_tests": {"input": ["1"], "output": []}})


def test_tests_with_half_a_character_which_no_message_can_hold_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"a text with half a character \(row 0: column `tests` holds"):
        load(tmp_path, '{"question": "q", "tests": {"inputs": ["\\ud800"], "outputs": ["2"]}}')
