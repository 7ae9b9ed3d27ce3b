"""Functions and classes that the configuration names by their dotted names."""

import ast
import importlib
import importlib.util
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError


def resolve_function(dotted: str) -> Callable[..., Any]:
    """Imports `package.module.function`. Each part after the package may also be a class."""
    parts = dotted.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name, attributes = ".".join(parts[:split]), parts[split:]
        try:
            target: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not f"{module_name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"`{dotted}` cannot be imported: {module_name} needs module {error.name!r}"
                    + old_name(error, parts[0])
                ) from error
            continue
        for attribute in attributes:
            if not hasattr(target, attribute):
                raise ConfigError(f"`{dotted}` does not exist: {target.__name__} has no {attribute!r}")
            target = getattr(target, attribute)
        if not callable(target):
            raise ConfigError(f"`{dotted}` is not a function but {type(target).__name__}")
        return target
    raise ConfigError(
        f"`{dotted}` cannot be imported: no module {parts[0]!r} on sys.path; write package.module.function "
        "and add its folder to PYTHONPATH"
    )


DOMAINS = "pipelinerl.domains."


def old_name(error: ModuleNotFoundError, package: str) -> str:
    """What to write in a copy of one of PipelineRL's domains that imports itself by its old name. Empty: it is none."""
    if not error.name or not error.name.startswith(DOMAINS) or package == "pipelinerl":
        return ""
    domain = error.name.removeprefix(DOMAINS).partition(".")[0]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{place}. If `{package}` is a copy of that domain, write `{package}` for `{DOMAINS}{domain}` in it"


def self_imports(dotted: str) -> Iterator[str]:
    """Yields where a copied domain imports modules of `pipelinerl.domains` that it has itself: `FILE:LINE imports …`.

    ``dotted``: a function of the package, which is not imported here.
    """
    package, *inner = dotted.split(".")[:-2] or [dotted.partition(".")[0]]
    found = importlib.util.find_spec(package) if package != "pipelinerl" else None
    for top in map(Path, (found and found.submodule_search_locations) or ()):
        folder = top.joinpath(*inner)  # of the domain: `package` may hold several
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(errors="replace", encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    names = [] if node.level else [node.module or ""]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                for name in names:
                    own = name.removeprefix(DOMAINS).split(".")[1:] if name.startswith(DOMAINS) else []
                    if own and (folder.joinpath(*own).is_dir() or folder.joinpath(*own).with_suffix(".py").is_file()):
                        here = ".".join([package, *inner, *own])
                        yield f"{path}:{node.lineno} imports {name}, and the copy has it: write {here}"
