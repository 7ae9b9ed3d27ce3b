"""Prints the functions, methods and classes of the package that nothing calls, and ends with 1 if there are any.

vulture finds them. Four things make its answer one for this package:

- A name in a string is a use: losses, engines, trackers and domains are named in configurations and tables.
- Examples call it, as users do. What nothing calls in them is not looked for.
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


def dead(package: Path, settings: dict, examples: Path | None = None) -> list[str]:
    """`file:line: unused function 'name'` of all that no code, string or setting, there or in the examples, names."""
    folders = [package, *([examples] if examples else [])]
    vulture = Vulture(**settings)
    vulture.scavenge(list(map(str, folders)))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        vulture.used_names.update(names_in_strings(path.read_text(encoding="utf-8")))
    for path in (path for folder in (package / "conf", *folders[1:]) for path in folder.rglob("*.yaml")):
        vulture.used_names.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return [
        f"{Path(item.filename).relative_to(package.parent)}:{item.first_lineno}: {item.message}"
        for item in vulture.get_unused_code()
        if item.typ in KINDS
        and (path := Path(item.filename)).is_relative_to(package)
        and path.parent not in (package, package / "testing")
    ]


if __name__ == "__main__":
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = dead(ROOT / "pipelinerl", pyproject["tool"]["vulture"], ROOT / "examples")
    print("\n".join(found) or "no dead code")
    sys.exit(bool(found))
