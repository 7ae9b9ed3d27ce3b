"""Runs the tests of one module after another under mutants, at the cost of the tests alone where that is possible.

Its working directory is a copy of the repository that belongs to it. It reads one JSON object per line from standard
input and writes one per line. A process that has imported torch and pytest, and nothing of the repository, forks

- one process per module, which collects the module's tests and waits. For a mutant it forks again, gives the module's
  functions the code of the mutant, and runs the tests that are collected,
- one process for each mutant that this cannot express, as its change runs when the module is imported, and for each
  mutant that has survived. It imports the repository anew, with the mutant's source in the module's file.
"""

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import hypothesis
import pytest

OWN = {"pipelinerl", "tests", "conf", "examples", "benchmarks", "assets", "conftest", "__main__"}
"""First names of modules that every run imports anew."""
OPTIONS = (
    *("-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "--hypothesis-profile=mutation"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # the plugins are imported before
)
BROKEN, ENDED = 70, -1
"""Exit codes of a run in which pytest itself failed, and of one that was ended: it took too long, or crashed."""
CO_OPTIMIZED = 1
"""Flag of the code of functions. Modules and bodies of classes, which run at import, do not have it."""


def wait_for(pid: int, wall_s: float) -> tuple[int, float]:
    """(exit code, CPU seconds) of a child, whose process group is ended with it."""
    deadline = time.monotonic() + wall_s
    while not (found := os.wait4(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(found[1])
    return code if code >= 0 else ENDED, found[2].ru_utime + found[2].ru_stime


def begin_child(cpu_s: int) -> None:
    """Makes a fork a process group of its own, with a limit of CPU time, whose output goes to a file."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open("last_run.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)


def in_child(work: Callable[[], int]) -> int:
    """Forks a process that ends with the code of ``work``. Returns its number."""
    if pid := os.fork():
        return pid
    code = BROKEN
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


# ---- a run that imports everything anew


def whole_run(tests: list[str], cpu_s: int, wall_s: int, report: Path | None = None) -> tuple[int, float]:
    """Runs the tests. Writes the names of all imported modules to ``report``, else leaves no bytecode behind."""

    def work() -> int:
        begin_child(cpu_s)
        if report is None:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        code = int(pytest.main([*OPTIONS, *tests]))
        if report is not None:
            report.write_text(json.dumps(sorted(sys.modules)))
        return code

    return wait_for(in_child(work), wall_s)


def preload(names: Iterable[str]) -> None:
    for name in names:
        if name.split(".")[0] not in OWN:
            with contextlib.suppress(BaseException):
                importlib.import_module(name)


# ---- a run in a fork of a process that has collected the tests


def functions_in(code: CodeType) -> Iterator[CodeType]:
    """The code of the functions that a module or a body of a class makes, in the order of their lines."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            if part.co_flags & CO_OPTIMIZED:
                yield part
            else:
                yield from functions_in(part)


def at_import(code: CodeType) -> tuple[Any, ...]:
    """What a module's own code does, without the code of its functions."""
    parts = [
        part if not isinstance(part, CodeType) else at_import(part) if not part.co_flags & CO_OPTIMIZED else None
        for part in code.co_consts
    ]
    return code.co_code, code.co_names, [(type(part), part) for part in parts]


class Collected:
    """A plugin: when the tests are collected, waits for mutants and runs the tests in a fork for each.

    Args:
        module: path of the mutated module.
        jobs, answers: one line of JSON each way: the mutant's source and limits, the exit code or None.
    """

    def __init__(self, module: str, jobs: Any, answers: Any) -> None:
        self._jobs, self._answers, self._module = jobs, answers, Path(module).resolve()
        self._original = self._compile(self._module.read_text())
        self._codes = list(functions_in(self._original))

    def _compile(self, source: str) -> CodeType:
        return compile(source, str(self._module), "exec", dont_inherit=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In a fork None, so that pytest runs the tests. Here True, when no more mutants come."""
        name = str(self._module)
        # type() instead of isinstance(), which some objects of torch answer with a warning.
        live = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == name]
        gc.freeze()
        print(json.dumps(len(session.items)), file=self._answers, flush=True)
        for line in self._jobs:
            job = json.loads(line)
            changes = self._changes(self._compile(job["source"]), live)
            if changes is None:
                print("null", file=self._answers, flush=True)
                continue
            pid = os.fork()
            if not pid:
                begin_child(job["cpu_s"])
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
                for function, code in changes:
                    function.__code__ = code
                return None
            print(json.dumps(wait_for(pid, job["wall_s"])[0]), file=self._answers, flush=True)
        return True

    def _changes(self, mutant: CodeType, live: list[FunctionType]) -> list[tuple[FunctionType, CodeType]] | None:
        """The functions whose code is another one, or None if something else has changed."""
        codes = list(functions_in(mutant))
        if at_import(mutant) != at_import(self._original) or len(codes) != len(self._codes):
            return None
        changes = []
        for old, new in zip(self._codes, codes, strict=True):
            if old == new:
                continue
            found = [f for f in live if f.__code__ == old]
            if not found or old.co_freevars != new.co_freevars:
                return None
            changes += [(function, new) for function in found]
        return changes


class Module:
    """A module whose tests pass, and the process that has collected them."""

    def __init__(self, path: str, tests: list[str]) -> None:
        self.path, self._tests = Path(path), tests
        self._original, self._time_s = self.path.read_bytes(), self.path.stat().st_mtime
        self._later_s = time.time() + 10_000
        report = Path("modules.json").resolve()
        report.unlink(missing_ok=True)
        self.code, self.cpu_s = whole_run(tests, 600, 3600, report)
        if report.exists():
            preload(json.loads(report.read_text()))
        jobs_read, jobs_write = os.pipe()
        answers_read, answers_write = os.pipe()

        def work() -> int:
            os.close(jobs_write)
            os.close(answers_read)
            begin_child(1_000_000)
            plugin = Collected(path, os.fdopen(jobs_read), os.fdopen(answers_write, "w"))
            return int(pytest.main([*OPTIONS, *tests], plugins=[plugin]))

        self._collecting = in_child(work)
        os.close(jobs_read)
        os.close(answers_write)
        self._jobs, self._answers = os.fdopen(jobs_write, "w"), os.fdopen(answers_read)
        self.num_tests = json.loads(self._answers.readline() or "0")

    def test(self, source: str) -> int:
        """The exit code of the tests with ``source`` in place of the module. 0: the mutant survives."""
        # Ten seconds more than three times as long is an endless loop, also on a busy machine: it is CPU time.
        limits = int(10 + 3 * self.cpu_s), int(300 + 60 * self.cpu_s)
        self.path.write_text(source)
        self._later_s += 10  # so that no bytecode of other source counts as this one's
        os.utime(self.path, (self._later_s, self._later_s))
        try:
            job = {"source": source, "cpu_s": limits[0], "wall_s": limits[1]}
            print(json.dumps(job), file=self._jobs, flush=True)
            code = json.loads(self._answers.readline())
            return code if code else whole_run(self._tests, *limits)[0]
        finally:
            self.path.write_bytes(self._original)
            os.utime(self.path, (self._time_s, self._time_s))

    def close(self) -> None:
        self._jobs.close()
        self._answers.close()
        wait_for(self._collecting, 60)


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]  # a failure need not be the smallest one
    hypothesis.settings.register_profile("mutation", phases=phases, suppress_health_check=list(hypothesis.HealthCheck))
    module: Module | None = None
    for line in sys.stdin:
        job = json.loads(line)
        if "tests" in job:
            if module is not None:
                module.close()
            module = Module(job["path"], job["tests"])
            found = {"code": module.code, "cpu_s": module.cpu_s, "num_tests": module.num_tests}
        else:
            assert module is not None, "a mutant before its module"
            found = {"code": module.test(job["source"])}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    serve()
