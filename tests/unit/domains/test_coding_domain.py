import asyncio
import subprocess
import sys
from typing import Any

import pytest
from aiohttp import ClientSession, web
from omegaconf import OmegaConf

from pipelinerl.domains.coding import generate_rollout
from pipelinerl.domains.coding import rollouts as rollouts_module
from pipelinerl.domains.coding.completions import extract_code, standard_imports
from pipelinerl.domains.coding.judge import TestSuite, judge, same_text, same_value
from pipelinerl.domains.sandbox import Outcome, Sandbox
from pipelinerl.domains.sandbox import fusion as fusion_module
from pipelinerl.domains.sandbox.fusion import SandboxFusion
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.testing import run_rollout

REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
SQUARE = {"inputs": ["2\n", "3\n", "-1\n"], "outputs": ["4\n", "9\n", "1\n"]}
CALLS = {"inputs": [[2, 3], [0, 0]], "outputs": [5, 0], "fn_name": "add"}
WRAPPED = {"inputs": [[3], [[3]]], "outputs": [[3], [[3]]], "fn_name": "f"}
"""As in APPS and TACO: a list of one value stands for the value, too. The value of the second test is the list [3]."""
MANY = {"inputs": [[3]], "outputs": [[4, 5]], "fn_name": "f"}
KEYS = {"inputs": [[{"1": 3.0, "2": 4.5}]], "outputs": [{"1": 3, "2": 4.5}], "fn_name": "f"}
INFINITE = {"inputs": [[float("inf")]], "outputs": [-float("inf")], "fn_name": "f"}
LIVE_CODE = {"inputs": ["[1, 2]\n3"], "outputs": ["[[1, 3], [2, 3]]"], "fn_name": "f"}
ONE_IN_LIST = {"inputs": ["3"], "outputs": ["[5]"], "fn_name": "f"}
ASSERTS = {
    "asserts": ["assert set(f((1, 2), [2, 3])) == set((2,))", "assert f((1,), (1,)) == (1,) and not f((), ())"],
    "fn_name": "f",
}
SETUP = {
    "asserts": ["assert f(root) == least and math.floor(f(root)) == 3"],
    "fn_name": "f",
    "setup": "root = Node(1)\nroot.left = 2\nleast = 3",
}
TRUTH = {"asserts": ["assert f('ab')", "assert not f('b') and f('b') != 1"], "fn_name": "f"}
LONG = {"inputs": ["9" * 5000], "outputs": ["1" + "0" * 5000], "fn_name": "f"}


def run_plainly(code: str, stdin: str) -> Outcome:
    done = subprocess.run([sys.executable, "-c", code], input=stdin, capture_output=True, text=True)
    return Outcome(ended="exited", exit_code=done.returncode, seconds=0, stdout=done.stdout, stderr=done.stderr)


class Plain:
    """Runs harmless programs without isolation."""

    async def run_python(self, code, stdins):
        return [run_plainly(code, stdin) for stdin in stdins]


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\n"


@pytest.mark.parametrize(
    ("tests", "code", "status", "score"),
    [
        (SQUARE, "print(int(input()) ** 2)", "correct", 1),
        (SQUARE, "print(abs(int(input())) ** 2 if 1 else 0)", "correct", 1),
        (SQUARE, "n = int(input()); print(n * n if n > 0 else 0)", "wrong", 2 / 3),
        (SQUARE, "raise ValueError", "wrong", 0),
        (SQUARE, "print(int(input()) ** 2", "unparsable", 0),
        (SQUARE, "import sys; print(int(input()) ** 2); print('SyntaxError: no', file=sys.stderr)", "correct", 1),
        (CALLS, "def add(a, b): return a + b", "correct", 1),
        (CALLS, "class Solution:\n    def add(self, a, b): return a + b", "correct", 1),
        (CALLS, "def add(a, b):\n    print('noise'); return a + b", "correct", 1),
        (CALLS, "def add(a, b): return a * b", "wrong", 0.5),
        (CALLS, "def add(a, b): return {1}", "wrong", 0),
        (CALLS, "def sub(a, b): return a", "wrong", 0),
        (CALLS, "def add(a, b): return object()", "wrong", 0),
        (CALLS, "def add(a, b): return float(a + b)", "correct", 1),
        (CALLS, "def add(a, b): return np.int64(a + b)", "correct", 1),
        (CALLS, "def add(a: List[int], b): return Counter({1: a})[1] + math.floor(b)", "correct", 1),
        (CALLS, "from __future__ import annotations\ndef add(a: x, b): return reduce(max, [a + b])", "correct", 1),
        (CALLS, "def add(a, b): return a + b\nif __name__ == '__main__': print(add(1, int(input())))", "correct", 1),
        (CALLS, "def add(x): return x\nclass Solution:\n    def add(self, a, b): return add(a) + b", "correct", 1),
        (CALLS, "list, str, isinstance, print = [], '', 0, 0\ndef add(a, b): return a + b", "correct", 1),
        (WRAPPED, "def f(x): return x", "correct", 1),
        (WRAPPED, "def f(x): return [x]", "correct", 1),
        (WRAPPED, "def f(x): return 3", "wrong", 0.5),
        (MANY, "def f(x): return 4", "wrong", 0),
        (MANY, "def f(x): return (4, 5)", "correct", 1),
        (MANY, "def f(x): return {4, 5}", "wrong", 0),
        (KEYS, "def f(d): return {k: d[k] for k in (1, 2)}", "correct", 1),
        (KEYS, "def f(d): return {np.int64(k): np.float32(d[k]) for k in d}", "correct", 1),
        (INFINITE, "def f(x): return -x", "correct", 1),
        (INFINITE, "def f(x): return x", "wrong", 0),
        (LIVE_CODE, "class Solution:\n    def f(self, a: List[int], k): return [(x, k) for x in a]", "correct", 1),
        (LIVE_CODE, "class Solution:\n    def f(self, a, k): return [[x, str(k)] for x in a]", "wrong", 0),
        (ONE_IN_LIST, "def f(x): return 5", "wrong", 0),
        (ASSERTS, "def f(a, b): return tuple(set(a) & set(b))", "correct", 1),
        (ASSERTS, "def f(a, b): return sorted(set(a) & set(b))", "wrong", 0.5),
        (ASSERTS, "class Any(tuple):\n    def __eq__(self, other): return True\ndef f(a, b): return Any()", "wrong", 0),
        (ASSERTS, "import os\ndef f(a, b): os._exit(0)", "wrong", 0),
        (
            SETUP,
            "class Node:\n    def __init__(self, key): self.key = key\ndef f(n): return n.key + n.left",
            "correct",
            1,
        ),
        (TRUTH, "def f(x): return re.match('a', x)", "correct", 1),
        (TRUTH, "def f(x): return object()", "wrong", 0.5),
        (LONG, "def f(x): return x + 1", "correct", 1),
        (LONG, "def f(x): return x + 2", "wrong", 0),
        (LONG, "def f(x): return str(x + 1)", "wrong", 0),
        ({"inputs": ["9000"], "outputs": ["1" + "0" * 9000]}, "print(10 ** int(input()))", "correct", 1),
        (SQUARE, "def f(n): return n and f(n - 1)\nprint(int(input()) ** 2 + f(2000) + floor(0.5))", "correct", 1),
    ],
)
async def test_programs_are_judged_on_their_tests(tests, code, status, score):
    verdict = await judge(fenced(code), TestSuite.from_problem(tests), Plain())
    assert (verdict.status, verdict.score) == (status, pytest.approx(score))


@pytest.mark.parametrize(
    "tests",
    [
        {"inputs": ["a"], "outputs": ["SECRET"]},
        {"inputs": [["a"]], "outputs": ["SECRET"], "fn_name": "f"},
        {"asserts": ["assert f('a') == 'SECRET'"], "fn_name": "f"},
        {"asserts": ["assert f(x) == y"], "fn_name": "f", "setup": "import math\nx = [1]\nx[0] = 2\ny = {0: 'SECRET'}"},
    ],
)
async def test_expected_outputs_never_reach_the_program(tests):
    seen: list[Any] = []

    class Watch(Plain):
        async def run_python(self, code, stdins):
            seen.append((code, stdins))
            return await super().run_python(code, stdins)

    await judge(fenced("PROGRAM = 1\ndef f(x): return x"), TestSuite.from_problem(tests), Watch())
    beside = [run for run in seen if "PROGRAM" in repr(run)]
    assert beside
    assert "SECRET" not in repr(beside)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nb\n```", "a\n"),
        ("```python\na\n```\nIt prints\n```\n5\n```", "a\n"),
        ("```\nprint(5)\n```\nIt prints\n```\n5\n```", "print(5)\n"),
        ("```python\na\n```\nBetter:\n```\ndef f():\n    pass\n```", "def f():\n    pass\n"),
        ("1. So:\n   ```python\n   if a:\n\n       b\n   ```", "if a:\n\n    b\n"),
        ("```python\n  if a:\n      b\n```", "if a:\n    b\n"),
        ("\t```py\n\ta\n\t```", "a\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("I try ```python\nb\n```\nSo:\n```python\na\n```", "a\n"),
        ("```python\na", None),
        ("none", None),
    ],
)
def test_last_closed_python_block_is_the_program(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("code", "imports"),
    [
        ("x: List[int] = deque()", ["from typing import List", "from collections import deque"]),
        ("heapq.heappop(heapq)", ["import heapq"]),
        ("datetime.datetime.now()", ["import datetime"]),
        ("from math import *\nmath = 1\nprint(math, pow(2, 3))", []),
        ("def f(gcd):\n    return gcd", []),
        ("def f(a):\n    def g(): return lcm(a, mode)\n    mode = a", ["from math import lcm"]),
        ("def f(:", []),
        ("x" + ".a" * 40_000, []),
    ],
)
def test_standard_names_that_a_program_does_not_bind_are_imported(code, imports):
    assert sorted(standard_imports(code)) == sorted(imports)


def test_many_open_fences_take_linear_time():
    assert extract_code("```python\n" * 20_001) is not None


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2 \n\n", "1 2\n", True),
        ("0.3333333", "0.33333333", True),
        ("0.34", "0.33", False),
        ("1", "1.0", True),
        ("1.0", "1", True),
        ("1.0000001", "1", False),
        ("1 2.0", "1 2", True),
        ("Case 1.0", "Case 1", False),
        ("1e3", "1000", True),
        ("Infinity", "inf", True),
        ("101", "0101", False),
        ("yes", "YES", False),
        ("2 1", "1 2", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("9" * 5000 + ".0", "9" * 5000, True),
        ("50000000000000001", "50000000000000000", False),
        ("1\n\n2\n", "1\n2", True),
        ("  1\n2", "1\n2", True),
        ("1_0", "10", False),
        ("a\nb", "a b", False),
        ("nan", "1.5", False),
        ("", "", True),
    ],
)
def test_texts_are_compared_by_lines_and_decimals_by_value(actual, expected, same):
    assert same_text(actual, expected) is same


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ([1, [2]], [1, [2]], True),
        (1, 1.0, True),
        (1.0, 1, True),
        (1.0000001, 1, False),
        (True, 1, True),
        (True, "True", False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        (0.5000001, 0.5, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (10**20 + 1, 1e20, False),
        ([1, 2], [2, 1], False),
        ({"1": 2}, {"1": 2, "2": 2}, False),
        ([1], [1, 2], False),
        (None, None, True),
        ("1", 1, False),
    ],
)
def test_values_are_compared_as_python_does_but_for_rounding(actual, expected, same):
    assert same_value(actual, expected) is same


@pytest.mark.parametrize("name", ["add; import os", "1", ""])
def test_function_name_must_be_a_name(name):
    with pytest.raises(DomainError, match="fn_name"):
        TestSuite.from_problem({"inputs": [1], "outputs": [1], "fn_name": name})


@pytest.mark.parametrize(("partial", "reward"), [(True, 2 / 3), (False, 0.0)])
async def test_partial_credit_is_the_configurations_choice(monkeypatch, partial, reward):
    monkeypatch.setattr(rollouts_module, "runner_of", lambda cfg, session: Plain())
    cfg = {"rewards": REWARDS, "environment": {"partial_credit": partial}}
    reply = fenced("n = int(input()); print(n * n if n > 0 else 0)")
    result = await run_rollout(generate_rollout, {"task": "Square.", "tests": SQUARE}, [reply], cfg)
    assert result.metrics.reward == pytest.approx(reward)


async def test_endpoint_of_configuration_or_environment_chooses_sandbox_fusion(monkeypatch):
    async with ClientSession() as session:
        empty = OmegaConf.create({"sandbox_endpoint": None})
        monkeypatch.delenv("SANDBOX_ENDPOINT", raising=False)
        assert isinstance(rollouts_module.runner_of(empty, session), Sandbox)
        monkeypatch.setenv("SANDBOX_ENDPOINT", "http://x")
        assert isinstance(rollouts_module.runner_of(empty, session), SandboxFusion)
        monkeypatch.delenv("SANDBOX_ENDPOINT")
        given = OmegaConf.create({"sandbox_endpoint": "http://y"})
        assert isinstance(rollouts_module.runner_of(given, session), SandboxFusion)


async def fusion(answers: list[dict[str, Any]], stdins: list[str]) -> list[Outcome]:
    """Asks a fake SandboxFusion."""

    async def run_code(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["language"] == "python"
        return web.json_response(answers.pop(0))

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with ClientSession() as session:
            endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/"
            return await SandboxFusion(endpoint, session).run_python("code", stdins)
    finally:
        await runner.cleanup()


def answer(status: str, code: int | None, stdout: str = "") -> dict[str, Any]:
    return {"status": "Success", "run_result": {"status": status, "return_code": code, "stdout": stdout, "stderr": ""}}


async def test_sandbox_fusion_answers_become_outcomes():
    good, late = answer("Finished", 0, "4\n"), answer("TimeLimitExceeded", None)
    outcomes = await fusion([good, late], ["2", "3", "4"])
    assert [(o.ended, o.stdout) for o in outcomes] == [("exited", "4\n"), ("time", "")]


async def test_sandbox_error_is_repeated_and_then_a_verifier_error(monkeypatch):
    monkeypatch.setattr("pipelinerl.domains.sandbox.fusion.FIRST_DELAY_S", 0.001)
    failed = {"status": "SandboxError", "message": "no container"}
    (outcome,) = await fusion([failed, answer("Finished", 0, "ok")], [""])
    assert outcome.stdout == "ok"
    with pytest.raises(VerifierError, match="no container"):
        await fusion([dict(failed) for _ in range(9)], [""])


async def test_sandbox_fusion_of_every_rollout_shares_the_workers_slots(monkeypatch):
    monkeypatch.setattr(fusion_module, "MAX_CONCURRENT", 2)
    under_way, most, timeouts = 0, 0, set()

    async def run_code(request: web.Request) -> web.Response:
        nonlocal under_way, most
        timeouts.add((await request.json())["run_timeout"])
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01)  # long enough for the others to arrive
        under_way -= 1
        return web.json_response(answer("Finished", 0, "ok"))

    app = web.Application()
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cfg = OmegaConf.create({"sandbox_endpoint": endpoint, "sandbox_timeout_s": 3.5})
    try:
        async with ClientSession() as session:
            rollouts = (rollouts_module.runner_of(cfg, session) for _ in range(8))
            outcomes = await asyncio.gather(*(one.run_python("code", [""]) for one in rollouts))
    finally:
        await runner.cleanup()
    assert [outcome.stdout for (outcome,) in outcomes] == ["ok"] * 8
    assert (most, timeouts) == (2, {3.5})
