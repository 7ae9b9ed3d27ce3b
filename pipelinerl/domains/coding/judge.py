"""Judges a program on its tests. Only inputs enter the sandbox. The expected outputs never do.

There are two kinds of tests: standard input → standard output, and function calls with arguments and result as JSON.
"""

import json
import re
import secrets
from dataclasses import dataclass
from typing import Any

from pipelinerl.domains.sandbox import Outcome, ProgramRunner
from pipelinerl.errors import DomainError
from pipelinerl.records.verdicts import Verdict, correct, no_answer

FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+$", re.MULTILINE)
LANGUAGES = ("", "python", "python3", "py")
MAX_CODE_CHARS = 100_000
TOLERANCE = 1e-6
SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test: standard input and expected result. For function calls the result is a value, otherwise a text."""

    __test__ = False

    stdin: str
    expected: Any


@dataclass(frozen=True, kw_only=True)
class TestSuite:
    """The tests of one problem. If ``function`` is set, they are calls of that function."""

    __test__ = False

    tests: tuple[Test, ...]
    function: str | None = None

    @classmethod
    def from_problem(cls, problem: dict[str, Any]) -> "TestSuite":
        """Reads ``{"inputs": […], "outputs": […], "fn_name": name}``. Without a name, inputs and outputs are texts."""
        inputs, outputs = problem.get("inputs"), problem.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
            raise DomainError("a coding problem needs `inputs` and `outputs`, two lists of the same length, not empty")
        function = problem.get("fn_name")
        if function is not None and not (isinstance(function, str) and function.isidentifier()):
            raise DomainError(f"`fn_name` is {function!r}: it must be the name of a function")
        if function is not None and not all(isinstance(arguments, list) for arguments in inputs):
            raise DomainError(f"with `fn_name` every one of `inputs` must be a list of arguments, not {inputs[0]!r}")
        pairs = zip(inputs, outputs, strict=True)
        if function is None:
            return cls(tests=tuple(Test(stdin=as_text(i), expected=as_text(o)) for i, o in pairs))
        return cls(tests=tuple(Test(stdin=json.dumps(i), expected=o) for i, o in pairs), function=function)


def as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def extract_code(completion: str) -> str | None:
    """Returns the last closed fenced block that is Python or names no language. None if there is none."""
    code, opening = None, None
    for fence in FENCE.finditer(completion):
        if opening is None:
            opening = fence
        else:
            if opening[1].lower() in LANGUAGES:
                code = completion[opening.end() + 1 : fence.start()]
            opening = None
    return code


async def judge(completion: str, suite: TestSuite, runner: ProgramRunner) -> Verdict:
    """Judges a whole output. The score is the share of tests passed, and ``correct`` means all.

    Args:
        completion: the model's output.
        suite: the tests.
        runner: runs the program.
    Raises:
        VerifierError: the sandbox failed.
    """
    code = extract_code(completion)
    if code is None:
        return no_answer("no fenced program")
    if len(code) > MAX_CODE_CHARS:
        return Verdict(status="unparsable", detail=f"a program of more than {MAX_CODE_CHARS} characters")
    marker = secrets.token_hex(16)
    program = code if suite.function is None else code + harness(suite.function, marker)
    outcomes = await runner.run_python(program, [test.stdin for test in suite.tests])
    last = outcomes[0].stderr.rstrip().rpartition("\n")[2]
    if outcomes[0].exit_code and last.startswith(SYNTAX_ERRORS):
        return Verdict(status="unparsable", detail=last[:200])
    passed = [
        passes(outcome, test, marker if suite.function else None)
        for outcome, test in zip(outcomes, suite.tests, strict=False)
    ]
    if len(passed) == len(suite.tests) and all(passed):
        return correct()
    first = next((i for i, good in enumerate(passed) if not good), len(passed) - 1)
    detail = f"test {first} of {len(suite.tests)}: {outcomes[first].ended} {outcomes[first].stderr[-200:]}"
    return Verdict(status="wrong", score=sum(passed) / len(suite.tests), detail=detail)


def harness(function: str, marker: str) -> str:
    """Returns code that calls the function, or the method of ``class Solution``, with the arguments on standard input.

    It prints ``marker`` and the result as JSON.
    """
    return f"""

if __name__ == "__main__":
    import json as _json, sys as _sys
    _function = globals().get({function!r}) or getattr(Solution(), {function!r})
    _result = _function(*_json.loads(_sys.stdin.read()))
    print({marker!r} + _json.dumps(_result, default=list))
"""


def passes(outcome: Outcome, test: Test, marker: str | None) -> bool:
    """Whether one run produced the expected result. ``marker`` precedes the value of a function call."""
    if outcome.ended != "exited" or outcome.exit_code != 0:
        return False
    if marker is None:
        return same_text(outcome.stdout, test.expected)
    _, found, value = outcome.stdout.rpartition(marker)
    try:
        return bool(found) and same_value(json.loads(value), test.expected)
    except (ValueError, RecursionError):
        return False


def same_text(actual: str, expected: str) -> bool:
    """Whether the lines are equal, ignoring trailing spaces and trailing empty lines.

    Decimal numbers may differ by 1e-6, relative if they are larger than 1.
    """
    left, right = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (actual, expected))
    if left == right:
        return True
    if len(left) != len(right):
        return False
    words = [(a.split(), b.split()) for a, b in zip(left, right, strict=True)]
    return all(len(a) == len(b) and all(map(same_word, a, b)) for a, b in words)


def same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if "." not in expected:
        return False
    try:
        return close(float(actual), float(expected))
    except ValueError:
        return False


def same_value(actual: Any, expected: Any) -> bool:
    """Whether JSON values are equal. Floats may differ by 1e-6, relative if they are larger than 1."""
    if isinstance(expected, float) and isinstance(actual, int | float) and not isinstance(actual, bool):
        return close(actual, expected)
    if isinstance(expected, list | tuple) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[key], expected[key]) for key in expected)
    return type(actual) is type(expected) and actual == expected


def close(actual: float, expected: float) -> bool:
    try:
        return abs(actual - expected) <= TOLERANCE * max(1.0, abs(expected))
    except OverflowError:  # a whole number beyond every float
        return False
