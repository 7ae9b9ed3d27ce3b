"""The names of vLLM's options, read from the source of the version that is installed: importing it takes seconds."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from pipelinerl.config.load import nearest_key
from pipelinerl.config.sections import Config
from pipelinerl.config.versions import installed_version
from pipelinerl.errors import ConfigError

ENGINE = "engine/arg_utils.py"
FRONT = ("entrypoints/common/cli_args.py", "entrypoints/launchers/cli_args.py")
"""In vLLM 0.33 and 0.32."""
CERTAIN = ("max-model-len", "dtype", "response-role")
"""Options of both versions. If one is missing, the source has a form that is not supported here."""
SAMPLING = "sampling_params.py"
CERTAIN_SAMPLING = ("max_tokens", "temperature")
"""Fields of its class `SamplingParams`."""

PREFIX = "vllm_config.vllm_kwargs."


def check_options(config: Config) -> None:
    """Raise ``ConfigError`` with the nearest name for an option or sampling parameter that vLLM does not have."""
    for name in config.vllm_config.vllm_kwargs:
        if (fault := fault_of(PREFIX + name)) is not None:
            raise ConfigError(fault)
    known = sampling_parameters()
    for section in ("llm", "test_llm"):
        for name, value in getattr(config, section).parameters.items() if known else ():
            if isinstance(value, bool) and known.get(name, "bool").replace("| None", "").strip() in ("int", "float"):
                raise ConfigError(f"`{section}.parameters.{name}` is {value}: it must be a number, not a boolean")
            if name not in known:
                near = nearest_key(name, sorted(known))
                meant = f"; did you mean `{near}`?" if near else ""
                raise ConfigError(f"`{section}.parameters.{name}` is no sampling parameter of vLLM's{meant}")


def fault_of(key: str) -> str | None:
    """The fault of a configuration key that names an unknown option of vLLM. None: it names none, or a known one."""
    known = option_names() if key.startswith(PREFIX) else frozenset()
    name = key.removeprefix(PREFIX).partition(".")[0].rstrip("+").replace("_", "-")  # `x.y`, `x+` set a part of x
    if not known or name in known or name.removeprefix("no-") in known:
        return None
    near = nearest_key(name, sorted(known))
    return f"`{key}` is no option of vLLM {installed_version('vllm')}" + (
        f"; did you mean `{near}`?" if near else "; `vllm serve --help=all` lists them"
    )


def option_names() -> frozenset[str]:
    """Names without leading dashes. Empty: not known, for example if a plugin of vLLM adds a platform."""
    root = vllm_folder()
    if root is None or entry_points(group="vllm.platform_plugins"):
        return frozenset()
    sources = [path for path in (root / ENGINE, *(root / name for name in FRONT)) if path.exists()]
    names = frozenset[str]().union(*map(names_of, sources))
    return names if names >= set(CERTAIN) else frozenset()


def vllm_folder() -> Path | None:
    """Folder of vLLM's source. None: it is not installed."""
    spec = find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def names_of(path: Path) -> frozenset[str]:
    """The names in a source file. Cached, because reading it takes a third of a second."""
    return frozenset(names_in(path.read_text(encoding="utf-8")))


def sampling_parameters() -> Mapping[str, str]:
    """Names of vLLM's sampling parameters with their types as written in its source. Empty: not known."""
    root = vllm_folder()
    if root is None or not (root / SAMPLING).exists():
        return {}
    classes = [
        node for node in ast.parse((root / SAMPLING).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    fields = (
        part
        for node in classes
        if node.name == "SamplingParams"
        for part in node.body
        if isinstance(part, ast.AnnAssign)
    )
    found = {part.target.id: ast.unparse(part.annotation) for part in fields if isinstance(part.target, ast.Name)}
    return found if found.keys() >= set(CERTAIN_SAMPLING) else {}


def names_in(source: str) -> Iterator[str]:
    """The long names in calls of `add_argument`, and the fields of classes whose name ends with `FrontendArgs`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            given = (argument.value for argument in node.args if isinstance(argument, ast.Constant))
            yield from (name[2:] for name in given if isinstance(name, str) and name.startswith("--"))
        elif isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            yield from (field.id.replace("_", "-") for field in fields if isinstance(field, ast.Name))
