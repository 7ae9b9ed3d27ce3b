"""Units of measurement, with pint: the units that words name, and factors between units."""

import functools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipelinerl.domains.math.answers.forms import CURRENCIES, GENERIC, LABELS, NOUNS, PREFIXES, SHORT_PLURALS, UNITS


@dataclass(frozen=True)
class Measure:
    """The words behind a number. ``units`` are the possible meanings, with powers, of words that pint knows."""

    units: tuple[tuple[str, Fraction], ...] = ()
    nouns: frozenset[str] = frozenset()


@functools.lru_cache(maxsize=1)
def registry() -> Any:
    import pint

    units: Any = pint.UnitRegistry(non_int_type=Fraction, autoconvert_offset_to_baseunit=False)
    for definition in CURRENCIES:
        units.define(definition)
    return units


@functools.lru_cache(maxsize=4096)
def read(words: str) -> Measure:
    """Returns the unit that words name, else their nouns."""
    text = re.sub(r"[{}]", "", re.sub(r"\\[,;: ]|~|\\cdot(?![A-Za-z])", " ", words))
    text = re.sub(r"\s+", " ", text.replace("°", "deg").replace("US$", "USD")).strip(" .,")
    if (unit := _expression(text)) is not None:
        return Measure(units=((unit, Fraction(1)),))
    first, _, rest = text.partition(" ")
    if rest and len(first) > 1 and (unit := _expression(first)) is not None and not re.search(r"[/^]| per ", text):
        return Measure(units=((unit, Fraction(1)),), nouns=unlisted(_nouns(rest)))
    return Measure(nouns=_nouns(text) - GENERIC)


def _nouns(text: str) -> frozenset[str]:
    return frozenset(map(_stem, re.findall(r"[^\s,.;:()/]+", text)))


def unlisted(nouns: frozenset[str]) -> frozenset[str]:
    """The words that may not be dropped: they may change the number."""
    return nouns - NOUNS - LABELS


def is_label(words: str, *, nouns: bool) -> bool:
    """Whether words in front of a number only name it. ``nouns``: whether nouns are allowed among them."""
    return all(
        {word.lower(), _stem(word)} & LABELS
        or (nouns and (_stem(word) in NOUNS or re.fullmatch("of|[A-Z]{1,4}|[a-z]", word)))
        for word in re.findall(r"[^\s,.:()$]+", words)
    )


def _expression(text: str) -> str | None:
    """A unit in pint's syntax. Powers and quotients are spelled in symbols or in words."""
    text = re.sub(r"\bper cent\b", "percent", text)
    text = re.sub(r"\b(?:square|sq\.?) +([A-Za-z]+)", r"\1^2", re.sub(r"\b(?:cubic|cu\.?) +([A-Za-z]+)", r"\1^3", text))
    text = re.sub(r"([A-Za-z]+) squared", r"\1^2", re.sub(r"([A-Za-z]+) cubed", r"\1^3", text))
    if re.sub(r"[A-Za-z]", "", text).strip(" .^-/*()0123456789%"):
        return None
    pieces = re.split(r"(\s+per\s+|\s*/\s*|\s*\*\s*|\s+)", text)
    built = ""
    for operand, joint in zip(pieces[::2], [*pieces[1::2], ""], strict=True):
        match = re.fullmatch(r"([A-Za-z%]+)\.?(?:\^\(?(-?[1-9])\)?)?", operand)
        name = None if match is None else _name(match[1])
        if match is None or name is None:
            return None
        built += name + (f"**({match[2]})" if match[2] else "")
        built += "/" if joint.strip() in ("per", "/") else "*" if joint else ""
    return built


@functools.lru_cache(maxsize=4096)
def _name(word: str) -> str | None:
    """The unit that one word names, in pint's spelling. Case matters for abbreviations."""
    if word == "%":
        return "percent"
    word = SHORT_PLURALS.get(word, word)
    if "/" in word:
        return f"({word})"
    for spelling in (word, word.lower()) if len(word) > 3 else (word,):
        for prefix, unit, plural in registry().parse_unit_name(spelling):
            if unit not in UNITS or prefix not in PREFIXES:
                continue
            short_prefix = prefix and not spelling.startswith(prefix)
            plural = plural or spelling.endswith("s")
            if (short_prefix and (plural or len(spelling) > 4) and len(spelling) > 3) or (
                plural and len(spelling) == 3
            ):
                continue  # `cats` are no centi-atmospheres
            return prefix + unit
    return None


def _stem(word: str) -> str:
    word = word.lower()
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def combine(left: Measure, right: Measure, power: Fraction) -> Measure:
    """The measure of a product with ``right`` to a power."""
    return Measure(
        units=(*left.units, *((unit, exponent * power) for unit, exponent in right.units)),
        nouns=left.nouns | right.nouns,
    )


def is_unit(measure: Measure, name: str) -> bool:
    return measure.units == ((name, Fraction(1)),)


def factor(answer: Measure, reference: Measure) -> Fraction | None:
    """Returns the factor from the answer's unit to the reference's. None: they measure different quantities."""
    if not answer.units or not reference.units:
        return None if answer.units or reference.units else Fraction(1)
    if {answer.units, reference.units} == {(("pound", Fraction(1)),), (("sterling", Fraction(1)),)}:
        return Fraction(1)
    if sorted(answer.units) == sorted(reference.units):
        return Fraction(1)
    left, right = _built(answer), _built(reference)
    if left.dimensionality != right.dimensionality:
        return None
    if any(name in ("degree_Celsius", "degree_Fahrenheit") for name, _ in (*answer.units, *reference.units)):
        return None  # their zeros differ
    return Fraction((1 * left).to_base_units().magnitude) / Fraction((1 * right).to_base_units().magnitude)


def _built(measure: Measure) -> Any:
    unit = registry().dimensionless
    for name, power in measure.units:
        unit = unit * registry().parse_units(name) ** int(power)
    return registry().Unit(unit)
