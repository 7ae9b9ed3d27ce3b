"""Judges a program on its tests. Only their inputs enter the program's sandbox, never the expected outputs.

A test is standard input and the expected text, a call and the values that it may return, or an assertion. An
assertion's calls run in the program's process, and the assertion later, on their values alone. `docs/verification.md`
says which values are equal.
"""

import json
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from pipelinerl.domains.coding.assertions import parse_assertion, statements_of
from pipelinerl.domains.coding.completions import extract_code, prepared, standard_imports
from pipelinerl.domains.json_text import dump, parse
from pipelinerl.domains.sandbox import Outcome, ProgramRunner
from pipelinerl.errors import DomainError
from pipelinerl.records.verdicts import Verdict, correct, no_answer

MAX_CODE_CHARS = 100_000
"""A longer program is not compiled. Codeforces allows 65,536 characters."""
TOLERANCE = 1e-6
"""Tolerance of decimals that most contests announce."""
SYNTAX_ERRORS = ("SyntaxError:", "IndentationError:", "TabError:")
NUMBER = re.compile(
    r"[+-]?(?:(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?|\.[0-9]++)(?:e[+-]?[0-9]{1,9})?|inf(?:inity)?)",
    re.ASCII | re.IGNORECASE,
)
"""A number without leading zeros: `007` and `7` are different texts."""
AS_MODULE = "_given = _sys.stdin.read(); __name__ = 'solution'; _sys.modules[__name__] = _sys.modules['__main__']"
"""Makes a program whose function is called a module, so that it does not run as a script and read its input."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """One test."""

    __test__ = False

    stdin: str
    """Standard input. For a call, its arguments as a JSON list. For an assertion, its calls as a JSON list."""
    expected: Any
    """The text, or a tuple of the right values, or the code that checks the values of the calls."""


@dataclass(frozen=True, kw_only=True)
class TestSuite:
    """The tests of one problem."""

    __test__ = False

    tests: tuple[Test, ...]
    function: str | None = None
    """The function that the tests call. None: they compare standard output."""
    setup: str | None = None
    """Code that runs before assertions. None: the tests are not assertions."""

    @classmethod
    def from_problem(cls, problem: dict[str, Any]) -> "TestSuite":
        """Reads tests in one of these forms.

        - ``{"inputs": [text], "outputs": [text]}``: standard input and output.
        - ``{"inputs": [[argument]], "outputs": [value], "fn_name": name}``, as in APPS and TACO: calls. A list of one
          value stands for itself and for the value.
        - ``{"inputs": [text], "outputs": [text], "fn_name": name}``, as in LiveCodeBench: JSON, one argument per line.
          With ``"unwrap": True``, outputs are read as in APPS.
        - ``{"asserts": [code], "fn_name": name, "setup": code}``: assertions about a function.

        Raises:
            DomainError: there are no tests, or they have another form.
        """
        function, asserts = problem.get("fn_name"), problem.get("asserts")
        if function is not None and not (isinstance(function, str) and function.isidentifier()):
            raise DomainError(f"`fn_name` is {function!r}: it must be the name of a function")
        if asserts == []:
            raise DomainError(f"no assertion about {function!r}")
        if asserts is not None:
            parts = [parse_assertion(one, str(function)) for one in asserts]
            tests = tuple(Test(stdin=json.dumps(part.expressions), expected=part.check) for part in parts)
            return cls(tests=tests, function=function, setup=problem.get("setup") or "")
        inputs, outputs = problem.get("inputs"), problem.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
            raise DomainError("a coding problem needs `inputs` and `outputs`, two lists of the same length, not empty")
        pairs = list(zip(inputs, outputs, strict=True))
        if function is None:
            return cls(tests=tuple(Test(stdin=as_text(i), expected=as_text(o)) for i, o in pairs))
        if all(isinstance(value, str) for pair in pairs for value in pair):
            unwrap = bool(problem.get("unwrap"))
            calls = [(json_list(i), right_values(parse(o), unwrap)) for i, o in pairs]
        elif all(isinstance(arguments, list) for arguments in inputs):
            calls = [(dump(i), right_values(o, True)) for i, o in pairs]
        else:
            raise DomainError(
                "with `fn_name` every one of `inputs` must be a list of arguments, or a text with the JSON of one in "
                f"each line and its output the text of JSON, not {inputs[0]!r} and {outputs[0]!r}"
            )
        return cls(tests=tuple(Test(stdin=i, expected=o) for i, o in calls), function=function)

    def program(self, code: str, marker: str) -> str:
        """Returns the program that runs in the sandbox. It writes ``marker`` before the values of calls."""
        if self.function is None:
            return prepared(code)
        if self.setup is None:
            ending = running("calls.py", "call", "globals()", repr(self.function), "_given", repr(marker))
            return prepared(code, before=AS_MODULE, after=ending)
        calls = [expression for test in self.tests for expression in json.loads(test.stdin)]
        setup = "\n".join(statements_of(self.setup, calls))
        ending = running("calls.py", "evaluate", "globals()", repr(setup), "_given", repr(marker))
        return prepared(code, before=AS_MODULE, after=ending, names_in="\n".join([setup, *calls]))


def json_list(lines: str) -> str:
    """Returns the JSON list of the lines' values. JSON has no line break inside a text."""
    return "[" + ",".join(line for line in lines.split("\n") if line.strip()) + "]"


def right_values(output: Any, unwrap: bool) -> tuple[Any, ...]:
    return (output, output[0]) if unwrap and isinstance(output, list) and len(output) == 1 else (output,)


def as_text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


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
    outcomes = await runner.run_python(suite.program(code, marker), [test.stdin for test in suite.tests])
    last = outcomes[0].stderr.rstrip().rpartition("\n")[2]
    if outcomes[0].exit_code and last.startswith(SYNTAX_ERRORS):
        return Verdict(status="unparsable", detail=last[:200])
    answers = [answer_of(outcome, marker if suite.function else "") for outcome in outcomes]
    passed = await passed_tests(suite, answers, runner)
    if len(passed) == len(suite.tests) and all(passed):
        return correct()
    first = next((i for i, good in enumerate(passed) if not good), len(passed) - 1)
    detail = f"test {first} of {len(suite.tests)}: {outcomes[first].ended} {outcomes[first].stderr[-200:]}"
    return Verdict(status="wrong", score=sum(passed) / len(suite.tests), detail=detail)


def running(file: str, function: str, *arguments: str) -> str:
    """Returns code that calls a function of a file beside this one, in a namespace of its own."""
    return f"_own = {{}}\nexec({source(file)!r}, _own)\n_own[{function!r}]({', '.join(arguments)})\n"


@cache
def source(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


def answer_of(outcome: Outcome, marker: str) -> str | None:
    """Returns the program's output, or the part after ``marker`` if there is one. None: it failed."""
    if outcome.ended != "exited" or outcome.exit_code != 0:
        return None
    if not marker:
        return outcome.stdout
    _, found, answer = outcome.stdout.rpartition(marker)
    return answer if found else None


async def passed_tests(suite: TestSuite, answers: Sequence[str | None], runner: ProgramRunner) -> list[bool]:
    """Returns for each answer whether it is right. Assertions run in the sandbox, without the program."""
    pairs = list(zip(answers, (test.expected for test in suite.tests), strict=False))
    if suite.function is None:
        return [answer is not None and same_text(answer, text) for answer, text in pairs]
    if suite.setup is None or not any(answers):
        return [answer is not None and is_value(answer, values) for answer, values in pairs]
    marker, checks = secrets.token_hex(16), [check for _, check in pairs]
    setup = standard_imports("\n".join([suite.setup, *checks])) + statements_of(suite.setup)
    program = prepared(
        "", after=running("checks.py", "check", repr(setup), repr(checks), "_sys.stdin.read()", repr(marker))
    )
    (outcome, *_) = await runner.run_python(program, [json.dumps([answer or "" for answer in answers])])
    held = json.loads(answer_of(outcome, marker) or "[]")
    return [bool(held) and held[index] for index in range(len(answers))]


def is_value(answer: str, values: tuple[Any, ...]) -> bool:
    """Whether the value that a call wrote is one of the right ones."""
    try:
        actual = parse(answer, object_hook=json_value)
    except (ValueError, LookupError, TypeError, RecursionError):  # no JSON, or a value that JSON does not have
        return False
    return any(same_value(actual, value) for value in values)


def json_value(kind: dict[str, Any]) -> Any:
    """Converts a kind of `calls.py` to plain JSON. Raises ``KeyError`` for a set, which no JSON value equals."""
    ((name, items),) = kind.items()
    if name == "dict":
        return {key if isinstance(key, str) else json.dumps(key): item for key, item in items}
    return {"tuple": list, "iterator": list}[name](items)


def same_text(actual: str, expected: str) -> bool:
    """Whether two texts have the same words in the same lines. Empty lines do not count; decimals have a tolerance."""
    left, right = ([line.split() for line in text.splitlines() if line.strip()] for text in (actual, expected))
    return len(left) == len(right) and all(map(same_line, left, right))


def same_line(actual: list[str], expected: list[str]) -> bool:
    """Whether two lines have the same words. In a line of numbers, 5 and 5.0 are the same."""
    if actual == expected:
        return True
    numbers = all(map(NUMBER.fullmatch, actual + expected))
    return len(actual) == len(expected) and all(same_word(a, b, numbers) for a, b in zip(actual, expected, strict=True))


def same_word(actual: str, expected: str, among_numbers: bool) -> bool:
    if actual == expected:
        return True
    if not (NUMBER.fullmatch(actual) and NUMBER.fullmatch(expected)):
        return False
    if "." in expected and close(float(actual), float(expected)):
        return True
    return among_numbers and Decimal(actual) == Decimal(expected)


def same_value(actual: Any, expected: Any) -> bool:
    """Whether JSON values are equal, as Python's ``==`` says. Two floats may differ by rounding, 1e-9 relative."""
    if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        return len(actual) == len(expected) and all(map(same_value, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(same_value(actual[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(actual, float):
        return math.isclose(actual, expected)
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return actual == expected
    return type(actual) is type(expected) and actual == expected


def close(actual: float, expected: float) -> bool:
    """Whether two numbers differ by no more than `TOLERANCE`, relative if they are larger than 1."""
    return abs(actual - expected) <= TOLERANCE * max(1.0, abs(expected))
