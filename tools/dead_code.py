"""Prints the functions, methods and classes of the package that nothing calls, and ends with 1 if there are any.

vulture finds them. Three things make its answer one for this package:

- A name in a string is a use: losses, engines, trackers and domains are named in configurations and tables.
- Modules beside the folders, and those of `testing`, are for users, who call what the package does not.
- Variables and attributes are left out. Fields of records and settings are read by their names at run time.

Who calls the names that vulture cannot see stands in `pyproject.toml`, `[tool.vulture]`.
"""

import ast
import re
import sys
import tomllib
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("function", "method", "property", "class", "import")


def names_in_strings(source: str) -> set[str]:
    """Every part of the strings that are a name or a dotted path: `zero`, `my.module.MyEngine`, `module:function`."""
    strings = {
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) if type(node.value) is str
    }
    return {name for text in strings if re.fullmatch(r"\w+([.:]\w+)*", text) for name in re.split("[.:]", text)}


def dead(package: Path, settings: dict) -> list[str]:
    """`file:line: unused function 'name'` of everything that no code, string or setting of the package names."""
    vulture = Vulture(**settings)
    vulture.scavenge([str(package)])
    for path in package.rglob("*.py"):
        vulture.used_names.update(names_in_strings(path.read_text(encoding="utf-8")))
    for path in (package / "conf").rglob("*.yaml"):
        vulture.used_names.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return [
        f"{Path(item.filename).relative_to(package.parent)}:{item.first_lineno}: {item.message}"
        for item in vulture.get_unused_code()
        if item.typ in KINDS and Path(item.filename).parent not in (package, package / "testing")
    ]


if __name__ == "__main__":
    found = dead(
        ROOT / "pipelinerl", tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["vulture"]
    )
    print("\n".join(found) or "no dead code")
    sys.exit(bool(found))
