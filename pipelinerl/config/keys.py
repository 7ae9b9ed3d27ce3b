"""A configuration key is declared once, in the typed field that holds it.

The annotation gives type and bound. `key` adds the default, the meaning, and whether a resumed run may change it.
Everything else reads the keys from here: the YAML files and the page of the documentation
(`pipelinerl.config.docs`), the check of a resumed run (`pipelinerl.config.resume`).
"""

import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import annotated_types
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

REQUIRED = "???"
"""Default of a key that the experiment must give: OmegaConf's mark of a missing value."""
BOUNDS = (
    (annotated_types.Gt, "gt", ">"),
    (annotated_types.Ge, "ge", "≥"),
    (annotated_types.Lt, "lt", "<"),
    (annotated_types.Le, "le", "≤"),
)
TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "text", Any: "anything", type(None): "null"}


class Section(BaseModel):
    """A section of the configuration: unknown keys are refused, values are frozen.

    The class docstring is the paragraph above the section's table in docs/configuration.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _boolean_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        taken = list(_plain_types(cls.model_fields[info.field_name].annotation))
        if (int in taken or float in taken) and bool not in taken and Any not in taken and _has_boolean(value):
            raise ValueError("holds a boolean, which is no number. YAML reads yes, no, on and off as booleans")
        return value


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key as it is declared."""

    name: str
    """Dotted, e.g. `finetune.rl.kl_coef`."""
    section: type[Section]
    type: str
    """Type and bound in words, e.g. `integer ≥ 1`."""
    choices: tuple[str, ...]
    """The values of a key that has only a few."""
    default: Any
    """As the YAML files have it: an interpolation stays a text, `???` is required."""
    meaning: str
    """The first sentence is the comment in the YAML file."""
    may_change: bool
    """Whether a resumed run may change it: it says how the run is executed, not which experiment it is."""

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def key(default: Any, meaning: str, *, may_change: bool = False, **bounds: Any) -> Any:
    """Declare a key: `attempts: PositiveInt = key(8, "rollouts of one problem")`.

    Args:
        default: the value in the YAML file. An interpolation is a text such as `"${seed}"`. `REQUIRED`: no default.
        meaning: sentences without a final full stop. The first one is the comment in the YAML file.
        may_change: whether a resumed run may change the value.
        bounds: pydantic's (`gt`, `ge`, `lt`, `le`, `pattern`), where the annotation does not have them.
    """
    return Field(description=meaning, json_schema_extra={"default": default, "may_change": may_change}, **bounds)


def entry_key(default: Any, meaning: str, *, may_change: bool = False, **bounds: Any) -> Any:
    """Declare a key of an entry of a list, which gets its default here, because no YAML file holds it."""
    return key(default, meaning, may_change=may_change, default_factory=lambda: default, **bounds)


def declared(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Every leaf key of a section and of the sections within it, in the order of declaration."""
    for name, field in section.model_fields.items():
        inner = subsection(field)
        if inner:
            yield from declared(inner, f"{prefix}{name}.")
        else:
            yield _key_of(f"{prefix}{name}", section, field)


def sections(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """The section itself and every section within it, with its dotted name, in the order of declaration."""
    yield prefix, section
    for name, field in section.model_fields.items():
        inner = subsection(field)
        if inner:
            yield from sections(inner, f"{prefix}.{name}".lstrip("."))


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a field holds, if it always holds one."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def optional_subsection(field: FieldInfo) -> type[Section] | None:
    """The section that a field may hold besides null, alone or in a list."""
    for part in typing.get_args(field.annotation):
        for candidate in (part, *typing.get_args(part)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
    return None


def _key_of(name: str, section: type[Section], field: FieldInfo) -> Key:
    extra = field.json_schema_extra
    assert isinstance(extra, dict), f"{name} is not declared with key(default, meaning)"
    return Key(
        name=name,
        section=section,
        type=type_in_words(field.annotation, field.metadata),
        choices=typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else (),
        default=extra["default"],
        meaning=field.description or "",
        may_change=bool(extra["may_change"]),
    )


def type_in_words(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """`PositiveInt | None` → `integer ≥ 1 or null`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_in_words(args[0], [*_flat(args[1:]), *metadata])
    if origin in (typing.Union, types.UnionType):
        known = [part for part in args if part is not type(None)]
        words = [type_in_words(part, metadata) for part in known]
        return " or ".join([*words, *(["null"] if len(known) < len(args) else [])])
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin is list:
        return f"list of {type_in_words(args[0])}"
    if origin is tuple:
        return f"list of {len(args)} {type_in_words(args[0])}s"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "mapping"
    return TYPE_NAMES[annotation] + _bounds_in_words(annotation, metadata)


def _plain_types(annotation: Any) -> Iterator[Any]:
    """`dict[str, float] | None` → dict, str, float, NoneType."""
    inner = () if typing.get_origin(annotation) is typing.Literal else typing.get_args(annotation)
    for part in inner:
        yield from _plain_types(part)
    if not inner:
        yield annotation


def _has_boolean(value: Any) -> bool:
    """Whether the value is a boolean, or a list or mapping with one."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_has_boolean, items))


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """Constraints, also those that pydantic groups in one `Field`."""
    return [item for entry in metadata for item in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _pattern_in_words(pattern: str) -> str:
    """`^(files|redis|<a dotted name>)$` → `files`, `redis` or a dotted name. A table's cell holds no `|`."""
    names = re.fullmatch(r"\^\(((?:\w+\|)+)\[A-Za-z_\].*\)\$", pattern)
    if names is None:
        return "with `" + pattern.replace("\\", "") + "`"
    return ", ".join(f"`{name}`" for name in names[1].strip("|").split("|")) + " or a dotted name"


def _bounds_in_words(annotation: Any, metadata: Sequence[Any]) -> str:
    words = []
    for constraint in metadata:
        for kind, name, sign in BOUNDS:
            if isinstance(constraint, kind):
                bound = getattr(constraint, name)
                above = annotation is int and sign == ">"
                words.append(f"{'≥' if above else sign} {bound + 1 if above else bound}")
        pattern = getattr(constraint, "pattern", None)
        if pattern:
            words.append(_pattern_in_words(pattern))
    return " " + ", ".join(words) if words else ""
