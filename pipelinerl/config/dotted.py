"""Functions and classes that the configuration names by their dotted names."""

import importlib
from collections.abc import Callable
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
