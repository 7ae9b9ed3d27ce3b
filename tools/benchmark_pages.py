"""Writes docs/benchmark-results.md from the recorded results: `python -m tools.benchmark_pages [--check]`.

Every JSON file of `benchmarks/` is a section: what its script measures, and its figures. Lists of more than `LONGEST`
entries are summed up by the range of each column. Texts of more than `LONGEST_TEXT` characters, and what lies deeper
than `DEEPEST` levels, are left to the file. `--check` writes nothing, and ends with 1 where the page differs.
"""

import argparse
import ast
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "benchmark-results.md"
LONGEST = 12
LONGEST_TEXT = 80
DEEPEST = 2
SCRIPTS = {"frozen_server": "recovery", "idle": "recovery", "gpu_runs_h200": "gpu_tests"}
"""Scripts of results that do not begin with the name of theirs."""
HEAD = """# Results of all benchmarks

Written by `make format` from `benchmarks/*.json`.
[Benchmarks](benchmarks.md) has the figures that matter to most users, and says how they were taken.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page differs")
    check = parser.parse_args().check
    text = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if check:
        print(f"{PAGE.relative_to(ROOT)} differs from the results: run `make format`", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    found = sorted(RESULTS.glob("*.json"))
    return "\n".join([HEAD, *(line for path in found for line in section(path))]).rstrip() + "\n"


def section(path: Path) -> Iterator[str]:
    result = json.loads(path.read_text(encoding="utf-8"))
    yield f"## {path.stem}\n"
    script = script_of(path.stem)
    if script is not None:
        docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        yield docstring.partition("\n\n")[0].replace("\n", " ") + "\n"
    yield f"`benchmarks/{path.name}`" + (f", of `benchmarks/{script.name}`" if script else "") + "\n"
    yield from tables(result, "")


def script_of(name: str) -> Path | None:
    """The script with the longest name that a result's name begins with."""
    name = SCRIPTS.get(name, name)
    known = [path for path in RESULTS.glob("*.py") if name == path.stem or name.startswith(f"{path.stem}_")]
    return max(known, key=lambda path: len(path.stem), default=None)


def tables(result: Any, title: str, depth: int = 0) -> Iterator[str]:
    """Markdown of a value: a table of its plain entries, one of parts that have the same entries, then other parts."""
    if isinstance(result, Sequence) and result and all(isinstance(row, Mapping) for row in result):
        yield from grid(title, result)
    if not isinstance(result, Mapping):
        return
    plain = {name: value for name, value in result.items() if is_plain(value)}
    if plain:
        yield from markdown([title or "figure", "value"], [[name, shown(value)] for name, value in plain.items()])
    alike = defaultdict[frozenset[str], dict[str, Any]](dict)
    for name, part in result.items():
        if isinstance(part, Mapping):
            alike[frozenset(key for key, value in part.items() if is_plain(value))][name] = part
    rows = {name: part for keys, parts in alike.items() if keys and len(parts) > 1 for name, part in parts.items()}
    for keys, parts in alike.items():
        if keys and len(parts) > 1:
            yield from grid(title, [{title or "case": name, **part} for name, part in parts.items()])
    if depth < DEEPEST:
        for name, part in result.items():
            if not is_plain(part) and name not in rows:
                yield from tables(part, f"{title}, {name}".removeprefix(", "), depth + 1)


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def grid(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One table of rows, or the range of each column where there are many."""
    columns = list(dict.fromkeys(name for row in rows for name, value in row.items() if is_plain(value)))
    if len(rows) <= LONGEST:
        if columns:
            yield from markdown(columns, [[shown(row.get(name)) for name in columns] for row in rows])
        return
    ranges = []
    for name in columns:
        values = [row[name] for row in rows if type(row.get(name)) in (int, float)]
        if values:
            ranges.append([name, shown(min(values)), shown(statistics.median(values)), shown(max(values))])
    if ranges:
        yield from markdown([f"{title or 'results'}, {len(rows)} rows", "least", "median", "most"], ranges)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]) + "\n"


def shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value).replace("|", "\\|").replace("\n", " ")
    return text if len(text) <= LONGEST_TEXT else "(in the file)"


if __name__ == "__main__":
    sys.exit(main())
