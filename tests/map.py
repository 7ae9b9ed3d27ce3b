"""Which test files import which module: `python -m tests.map [MODULE]`."""

import ast
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def tests_by_module() -> dict[str, list[str]]:
    """Module of the package → test files that import it or a name from it."""
    known = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "pipelinerl").rglob("*.py")
    }
    found: dict[str, set[str]] = defaultdict(set)
    for test in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(test.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if name in known:
                    found[name].add(str(test.relative_to(ROOT)))
    return {name: sorted(found[name]) for name in sorted(known)}


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else "pipelinerl"
    for name, tests in tests_by_module().items():
        if name.startswith(wanted):
            print(f"{name}: {', '.join(tests) or 'run as a process, or through the modules that import it'}")


if __name__ == "__main__":
    main()
