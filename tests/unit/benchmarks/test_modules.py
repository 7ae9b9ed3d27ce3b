"""All benchmarks start as their pages say: `python -m benchmarks.NAME`."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmarks"


def test_benchmarks_import_each_other_by_the_name_of_their_package() -> None:
    names = {path.stem for path in FOLDER.glob("*.py")}
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in names, path.name
            elif isinstance(node, ast.Import):
                assert not names & {alias.name.partition(".")[0] for alias in node.names}, path.name
