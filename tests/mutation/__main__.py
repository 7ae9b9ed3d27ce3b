"""Mutation tests of the numerical modules: `python -m tests.mutation [MODULE…]`, which `make test-mutation` runs.

Every mutant of a module in `modules.toml` is given to the module's tests. One that passes has to be killed by a new
test, or explained in that file. Ends with 1 if too small a share is killed or explained in any module, or if an
explanation is of no mutant that survived. What was run replaces the results of before in `results.json`.
"""

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit
from tests.mutation.modules import MODULES, RESULTS, Module, complaints, read_modules
from tests.mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "results", "site", "__pycache__", ".*_cache", ".hypothesis")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}


class Server:
    """A process that runs tests in its own copy of the repository (`server.py`)."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_COPIED)
        (folder / "tests" / "conftest.py").unlink()  # it looks for leaks on the whole machine, after every test
        self._process = subprocess.Popen(
            [sys.executable, str(folder / "tests" / "mutation" / "server.py")],
            cwd=folder,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.folder = folder
        self.is_ready_for = ""
        """The module whose tests have passed here."""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def prepare(self, module: Module) -> None:
        """Runs the tests of the unchanged module, and collects them for its mutants."""
        found = self.ask({"path": module.path, "tests": module.tests})
        if found["code"] or not found["num_tests"]:
            log = (self.folder / "last_run.txt").read_text()[-3000:]
            raise SystemExit(f"{module.name}: its tests fail without a mutant: {found}\n{log}")
        self.is_ready_for = module.name

    def survives(self, mutant: Mutant) -> bool:
        return self.ask({"source": mutant.source})["code"] == 0

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def run_module(module: Module, servers: Sequence[Server], commit: str) -> dict[str, Any]:
    """Returns what became of the module's mutants."""
    began = time.monotonic()
    mutants = mutants_of((servers[0].folder / module.path).read_text())
    free: queue.SimpleQueue[Server] = queue.SimpleQueue()
    for server in servers:
        free.put(server)

    def survives(mutant: Mutant) -> bool:
        server = free.get()
        try:
            if server.is_ready_for != module.name:
                server.prepare(module)
            return server.survives(mutant)
        finally:
            free.put(server)

    with ThreadPoolExecutor(len(servers)) as pool:
        survivors = [m for m, lives in zip(mutants, pool.map(survives, mutants), strict=True) if lives]
    names = [f"{mutant.line} → {mutant.becomes}" for mutant in survivors]
    unexplained = [
        f"{m.number}: {name}" for m, name in zip(survivors, names, strict=True) if name not in module.explained
    ]
    return {
        "commit": commit,
        "tests": module.tests,
        "mutants": len(mutants),
        "killed": len(mutants) - len(survivors),
        "explained": len(survivors) - len(unexplained),
        "share": round(1 - len(unexplained) / max(len(mutants), 1), 4),
        "unexplained": unexplained,
        "explained_but_killed": sorted(module.explained.keys() - set(names)),
        "seconds": round(time.monotonic() - began),
        "jobs": len(servers),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="names in modules.toml; all if there is none")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that run tests")
    options = parser.parse_args(arguments)
    modules = read_modules()
    if unknown := set(options.modules) - {module.name for module in modules}:
        parser.error(f"{', '.join(sorted(unknown))}: not in {MODULES.name}")
    chosen = [module for module in modules if not options.modules or module.name in options.modules]
    with tempfile.TemporaryDirectory() as folder:
        tested = commit(ROOT)
        servers = [Server(Path(folder) / str(i)) for i in range(options.jobs)]
        for module in chosen:
            result = run_module(module, servers, tested)
            counts = ", ".join(f"{result[name]} {name}" for name in ("mutants", "killed", "explained", "seconds"))
            print(f"{module.name}: {counts}", *result["unexplained"], sep="\n    ", flush=True)
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            results = dict(sorted({**known, module.name: result}.items()))
            RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        for server in servers:
            server.close()
    found = complaints(json.loads(RESULTS.read_text()), chosen)
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
