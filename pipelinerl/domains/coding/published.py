"""Reads a row's tests in the forms in which data sets publish them: APPS, TACO, LiveCodeBench, MBPP, HumanEval."""

import base64
import io
import pickle
import re
import zlib
from typing import Any

from pipelinerl.domains.coding import assertions
from pipelinerl.domains.coding.judge import TestSuite, as_text
from pipelinerl.domains.columns import found_column, inside, refuse_surrogates, shown
from pipelinerl.domains.json_text import dump, parse
from pipelinerl.domains.rows import UnusableRow, is_unusable
from pipelinerl.errors import DomainError

USUAL = ("tests", "input_output", "test_cases", "reward_model.ground_truth", "info", "test_list", "test")
"""Usual columns of the tests."""
PARTS = (
    "public_test_cases", "private_test_cases",  # LiveCodeBench
    "public_tests", "private_tests", "generated_tests",  # CodeContests
)  # fmt: skip
"""Columns that count together."""
MAX_BYTES = 1 << 30
"""Size of a row's tests after decompression: a few bytes can decompress to more than the memory of the machine."""
DEFINITION = re.compile(r"^[ \t]*def[ \t]+(\w+)", re.MULTILINE)

Row = dict[str, Any]
Tests = dict[str, Any]


def usable_tests(row: Row, name: str | None, max_tests: int | None) -> Tests:
    """Returns a row's tests in a form that `TestSuite.from_problem` reads, as texts.

    Args:
        row: column → value.
        name: the column of the tests. None: those of `PARTS`, or the first of `USUAL` that has a value.
        max_tests: maximum number of tests. None: all.
    Raises:
        UnusableRow: there are no tests, or they cannot be run.
    """
    try:
        tests = form_of(value_of(row, name), row)
        TestSuite.from_problem(tests)
        tests = {key: cases[:max_tests] if isinstance(cases, list) else cases for key, cases in as_texts(tests).items()}
        refuse_surrogates(
            name or "tests", *(text for part in tests.values() if isinstance(part, list) for text in part)
        )
        if "inputs" in tests and tests.get("fn_name"):
            for test in TestSuite.from_problem(tests).tests:
                parse(test.stdin)
        return tests
    except UnusableRow:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UnusableRow("the tests cannot be used", str(error)) from error


def value_of(row: Row, name: str | None) -> Any:
    """Returns the value of the column of the tests, or the cases of several columns."""
    parts = [cases_of(decoded(row[column])) for column in PARTS if not is_unusable(row.get(column))]
    if parts and not name:
        return [case for cases in parts for case in cases]
    for column in (name,) if name else USUAL:
        found = found_column(row, column, ())
        if found and not is_unusable(found[1]):
            return found[1]
    raise UnusableRow("the row has no tests", f"its columns are {sorted(row)}: dataset_loader_params.columns.tests")


def form_of(value: Any, row: Row) -> Tests:
    """Returns tests in a form that `TestSuite.from_problem` reads.

    Raises:
        DomainError: they have another form.
    """
    value = cases_of(decoded(value))
    if isinstance(value, dict) and "tests" in value:
        return form_of(value["tests"], row)
    if not value or (isinstance(value, dict) and not value.get("inputs", True)):
        raise UnusableRow("the row has no tests")
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and row.get("entry_point"):
        return assertions.of_check(value, row["entry_point"])
    parts: Any = [value] if isinstance(value, str) else value
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        before = [*(row.get("test_imports") or []), row.get("test_setup_code")]
        return assertions.of_list(parts, "\n".join(line for line in before if isinstance(line, str)))
    if isinstance(parts, list) and all(isinstance(part, dict) and {"input", "output"} <= part.keys() for part in parts):
        return of_cases(parts, row)
    raise DomainError(f"tests of no known form: {shown(value)}")


def cases_of(value: Any) -> Any:
    """Returns CodeContests' ``{"input": […], "output": […]}`` as a list of cases, and other values unchanged."""
    if isinstance(value, dict) and isinstance(value.get("input"), list) and isinstance(value.get("output"), list):
        pairs = zip(value["input"], value["output"], strict=True)
        return [{"input": given, "output": expected} for given, expected in pairs]
    return value


def of_cases(cases: list[Row], row: Row) -> Tests:
    """Reads ``[{"input", "output", "testtype"}]``, as LiveCodeBench has them. Others name the last key ``type``."""
    tests = {"inputs": [case["input"] for case in cases], "outputs": [case["output"] for case in cases]}
    if all((case.get("testtype") or case.get("type") or "stdin").startswith("stdin") for case in cases):
        return tests
    named = [case.get("fn_name") or inside(case, "metadata.func_name") for case in cases]
    named += [inside(row, "metadata.func_name"), *DEFINITION.findall(str(row.get("starter_code")))]
    function = next((name for name in named if isinstance(name, str)), None)
    if function is None:
        raise DomainError("calls of a function without its name")
    return {**tests, "fn_name": function}


def as_texts(tests: Tests) -> Tests:
    """Returns the tests as texts, so that they fit into messages between processes."""
    if "asserts" in tests:
        return tests
    inputs, outputs, function = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if function is None:
        if any(is_unusable(output) and not isinstance(output, str) for output in outputs):
            raise DomainError("a test without an output")
        return {
            "inputs": ["" if each is None else as_text(each) for each in inputs],
            "outputs": list(map(as_text, outputs)),
        }
    if isinstance(inputs[0], str):
        return {key: tests[key] for key in ("inputs", "outputs", "fn_name", "unwrap") if key in tests}
    lines = ["\n".join(map(dump, arguments)) for arguments in inputs]
    return {"inputs": lines, "outputs": list(map(dump, outputs)), "fn_name": function, "unwrap": True}


def decoded(value: Any) -> Any:
    """Decodes JSON, and JSON that LiveCodeBench compressed. Returns other texts, such as code, unchanged.

    Raises:
        DomainError: the compressed data is too large, cut off, or not a text.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse(value)
    except ValueError:
        pass
    try:
        packed = zlib.decompressobj()
        content = packed.decompress(base64.b64decode(value, validate=True), MAX_BYTES)
    except (ValueError, zlib.error):
        return value
    if not packed.eof:
        raise DomainError(f"compressed tests that are cut off or larger than {MAX_BYTES >> 20} MiB")
    return parse(unpickled_text(content))


def unpickled_text(content: bytes) -> str:
    """Returns the text in a pickle that holds only a text. No code of the pickle runs."""
    try:
        value = TextUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # a damaged pickle raises any exception
        raise DomainError(f"compressed tests that are not a pickled text: {error}") from error
    if not isinstance(value, str | bytes):
        raise DomainError(f"compressed tests that are not a pickled text: {type(value).__name__}")
    return value.decode() if isinstance(value, bytes) else value


class TextUnpickler(pickle.Unpickler):
    """Reads no classes and no functions. `find_class` is the only way from a pickle to code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
