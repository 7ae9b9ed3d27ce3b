"""Declarations of keys: their types in words, and the walk over sections."""

from typing import Any, Literal

import pytest
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipelinerl.config.keys import REQUIRED, Section, declared, key, sections
from tests.says import says


class Inner(Section):
    """Inner."""

    ratio: float | None = key(None, "a ratio", gt=0, le=1)


class Choice(Section):
    """Choice."""

    name: str = key(REQUIRED, "a name")


class Outer(Section):
    """Outer."""

    count: PositiveInt = key(3, "how many. Not how large", may_change=True)
    mode: Literal["a", "b"] = key("a", "which")
    template: str = key("{task}", "a text", pattern=r"\{task\}")
    inner: Inner
    choices: list[Choice] | None = key(None, "several")
    port: int | list[int] | None = key(None, "ports", ge=1, le=9)


def test_declared_keys_are_leaves_in_order():
    assert [found.name for found in declared(Outer)] == ["count", "mode", "template", "inner.ratio", "choices", "port"]
    assert [(name, section) for name, section in sections(Outer)] == [("", Outer), ("inner", Inner)]


def test_declared_key_carries_default_meaning_and_resume():
    count, mode, *_ = declared(Outer)
    assert (count.default, count.meaning, count.may_change, count.choices) == (3, "how many. Not how large", True, ())
    assert (mode.may_change, mode.choices) == (False, ("a", "b"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("count", "integer ≥ 1"),
        ("mode", "`a`, `b`"),
        ("template", "text with `{task}`"),
        ("inner.ratio", "number > 0, ≤ 1 or null"),
        ("choices", "list of mapping or null"),
        ("port", "integer ≥ 1, ≤ 9 or list of integer or null"),
    ],
)
def test_type_in_words_names_type_and_bound(name: str, words: str):
    assert {found.name: found.type for found in declared(Outer)}[name] == words


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (NonNegativeInt, "integer ≥ 0"),
        (PositiveFloat, "number > 0"),
        (NonNegativeFloat, "number ≥ 0"),
        (bool, "boolean"),
        (Any, "anything"),
        (dict[str, Any], "mapping"),
        (tuple[float, float], "list of 2 numbers"),
        (PositiveInt | list[int] | None, "integer ≥ 1 or list of integer or null"),
    ],
)
def test_type_in_words_of_annotations(annotation: Any, words: str):
    from pipelinerl.config.keys import type_in_words

    assert type_in_words(annotation) == words


def test_declared_field_without_key_is_an_error():
    class Bare(Section):
        """Bare."""

        count: int

    with pytest.raises(AssertionError, match=says("count", "key(default, meaning)")):
        list(declared(Bare))
