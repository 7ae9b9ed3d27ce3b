"""docs/architecture.md names what is there: every function and record of the journey, and every folder."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipelinerl"
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def section(heading: str) -> str:
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def rows(heading: str) -> list[list[str]]:
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@cache
def definitions(path: Path) -> set[str]:
    """Names of the functions and classes of a module, methods with their class."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if hasattr(item, "name")}
    return found


def test_every_function_of_the_journey_exists() -> None:
    named = [
        place for row in rows("The journey of a sample") for place in re.findall(r"`([\w/]+\.py):([\w.]+)`", row[2])
    ]
    assert len(named) >= 15
    assert [f"{file}:{name}" for file, name in named if name not in definitions(PACKAGE / file)] == []


def test_every_record_of_the_journey_exists() -> None:
    classes = {name for path in PACKAGE.rglob("*.py") for name in definitions(path)}
    named = {name for row in rows("The journey of a sample") for name in re.findall(r"`([A-Z]\w+)`", row[3])}
    assert len(named) >= 8
    assert named - classes == set()


def test_every_folder_has_its_line() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {row[0].strip("`/") for row in rows("The folders")} == folders


def test_page_can_be_read_in_a_few_minutes() -> None:
    assert len(PAGE.split()) <= 1500
