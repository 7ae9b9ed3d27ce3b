"""Names in YAML and on the command line that are translated once, when a configuration is read.

They are PipelineRL's, or this project's before. Inside the package a setting has one name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl.config.nested import ABSENT, value_at, with_settings, without
from pipelinerl.errors import ConfigError


@dataclass(frozen=True)
class OtherName:
    """Another name of a key."""

    name: str
    key: str
    default: Any
    """Default of the key. `base` always has the key, so that the other name wins over this value."""


OTHER_NAMES = (
    OtherName("finetune.fp32_lm_head", "fp32_lm_head", True),
    OtherName("finetune.rl.temperature", "llm.parameters.temperature", 1.0),
)
ENGINES = ("use_deepspeed", "use_fsdp")
"""Names that choose `finetune.engine` where it is auto."""
TARGET = "_target_"
"""Key of an entry of `environments`: its class."""
NAMES = {other.name: other.key for other in OTHER_NAMES} | dict.fromkeys(ENGINES, "finetune.engine")


def with_one_name(container: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration with every setting under its key.

    Raises:
        ConfigError: both names of a setting have values, and they differ; or two engines are chosen.
    """
    unset = [name for name in NAMES if value_at(container, name, ABSENT) is None]
    found = dict(container)
    for name in unset:
        found = without(found, name)
    for other in OTHER_NAMES:
        value = value_at(found, other.name)
        if value is None:
            continue
        now = value_at(found, other.key)
        if now not in (None, other.default, value):
            raise ConfigError(
                f"`{other.name}` is {value!r} but `{other.key}` is {now!r}: these are two names of one key; remove the "
                "first"
            )
        found = with_settings(without(found, other.name), {other.key: value})
    deepspeed, fsdp = (value_at(found, name) for name in ENGINES)
    for name, value in zip(ENGINES, (deepspeed, fsdp), strict=True):
        if value is not None:
            found = without(found, name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"`{name}` is {value!r}: it should be a valid boolean")
    if (deepspeed, fsdp) != (None, None) and value_at(found, "finetune.engine") in (None, "auto"):
        if deepspeed and fsdp:
            raise ConfigError("`use_deepspeed` and `use_fsdp` are both true: choose one, set the other to false")
        engine = "fsdp2" if fsdp else "ddp" if deepspeed is False else "auto"
        found = with_settings(found, {"finetune.engine": engine})
    return _with_listed_environments(found)


def _with_listed_environments(container: dict[str, Any]) -> dict[str, Any]:
    """`environments` as a list whose entries have a `key`. PipelineRL has a mapping, too, or one `environment`."""
    given, only = container.get("environments"), container.get("environment")
    if given and isinstance(given, Mapping) and all(isinstance(entry, Mapping) for entry in given.values()):
        return container | {"environments": [{**entry, "key": str(key)} for key, entry in given.items()]}
    if not given and isinstance(only, Mapping) and TARGET in only:
        return container | {"environments": [{**only, "key": "default"}]}
    return container


def with_other_names(container: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved configuration with the other names, too, as a domain of PipelineRL may read them."""
    engine = value_at(container, "finetune.engine")
    found = with_settings(container, {other.name: value_at(container, other.key) for other in OTHER_NAMES})
    return found | {"use_deepspeed": engine in ("auto", "deepspeed"), "use_fsdp": engine == "fsdp2"}


def addable(override: str) -> str:
    """`use_fsdp=true` → `++use_fsdp=true`: `base` does not have the other names, and Hydra would refuse to set them."""
    plain = override.lstrip("+")
    name, equals, _ = plain.partition("=")
    return f"++{plain}" if equals and name in NAMES else override


def explain_missing(text: str) -> str:
    """What to write in an interpolation that names one of them. ``text``: OmegaConf's error. Empty: it names none."""
    found = next((name for name in NAMES if f"'{name}'" in text), None)
    return f"; `{found}` is another name of `{NAMES[found]}`: refer to that" if found else ""
