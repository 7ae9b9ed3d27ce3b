"""The list of numerical modules with their tests and explained survivors, and what the recorded results must meet."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODULES, RESULTS = (Path(__file__).with_name(name) for name in ("modules.toml", "results.json"))
LEAST = 0.95
"""Share of a module's mutants that must be killed or explained."""


@dataclass(frozen=True)
class Module:
    """A module with its focused tests, and the survivors that are no fault, with the reason."""

    name: str
    """Of its results, which stay when the module moves."""
    path: str
    tests: list[str]
    explained: dict[str, str]


def read_modules(file: Path = MODULES) -> list[Module]:
    found = []
    for entry in tomllib.loads(file.read_text())["module"]:
        explained = {name: group["why"] for group in entry.get("explained", ()) for name in group["mutants"]}
        found.append(Module(entry["name"], entry["path"], entry["tests"], explained))
    return found


def complaints(results: dict[str, dict[str, Any]], modules: Sequence[Module]) -> list[str]:
    """Why the recorded results are not good enough, one line each."""
    found = []
    for module in modules:
        result = results.get(module.name)
        if result is None:
            found.append(f"{module.name} was never run")
            continue
        if result["share"] < LEAST:
            found.append(
                f"{module.name}: {result['share']:.2%} of the mutants are killed or explained, {LEAST:.0%} must be"
            )
        found += [f"{module.name}: an explanation is of no survivor: {name}" for name in result["explained_but_killed"]]
    return found
