"""Settings at which a model's computation may change with the length of a document, made so low that short ones cross.

Nobody can list their names, so every whole number of a configuration is a candidate, except ids of tokens and sizes.
``small_copy`` keeps those that change no parameter's shape and with which the model still computes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALLEST = 8
"""Smaller numbers are crossed by the copy's documents without being lowered."""
FIRST, STEP = 4, 2
"""The lowered values are 4, 6, 8, … in the order of the values in the configuration."""
OTHER_LENGTHS = (6, 11, 17)
"""Lengths of the documents that are always compared."""
IDS = ("_token_id", "_token_index", "_token_ids", "vocab_size")
"""Endings of names of settings that are ids of tokens, or their number."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A setting of the language model that is lowered in the small copy, wherever it occurs with this value."""

    name: str
    value: int
    """In the model's configuration."""
    lowered: int
    """In the copy."""
    is_crossed: bool
    """Whether a document of the run may be longer than ``value``. Otherwise only packs are longer than ``lowered``."""


Setting = tuple[str, int]
"""Name and value of a setting."""


def candidates(text: Any) -> list[Setting]:
    """The whole numbers in a configuration of a language model that may be thresholds, in ascending order."""
    found = {(value, name) for name, value, _, _ in _numbers("", vars(text)) if value >= SMALLEST}
    return [(name, value) for value, name in sorted(found)]


def arrange(settings: Sequence[Setting], longest: int | None) -> tuple[Threshold, ...]:
    """Choose the lowered values of ascending ``settings``. Equal values stay equal, and larger ones stay larger.

    ``longest``: tokens of the run's longest document. None: any number.
    """
    values = sorted({value for _, value in settings})
    crossed = [value for value in values if longest is None or value < longest]
    lowered = {value: min(FIRST + STEP * rank, value - 1) for rank, value in enumerate(crossed)}
    end = max(crossing_lengths(lowered.values()))
    lowered |= {value: min(end + STEP * rank, value) for rank, value in enumerate(values[len(crossed) :])}
    return tuple(
        Threshold(name=name, value=value, lowered=lowered[value], is_crossed=value in crossed)
        for name, value in settings
    )


def crossing_lengths(lowered: Iterable[int]) -> tuple[int, ...]:
    """Lengths in tokens of documents that reach and exceed each lowered value, and some more. Long and short mixed.

    The longest exceeds the product of any two values, because sparse attention may choose n blocks of n keys.
    """
    values = sorted({1, FIRST, *lowered})
    beyond = [length for value in values[1:] for length in (value, value + 1)]
    lengths = sorted({*OTHER_LENGTHS, *beyond, values[-1] * values[-2] + 1})
    return (*lengths[1::2], *lengths[::2])


def lower(text: Any, values: Mapping[Setting, int]) -> None:
    """Give settings of a configuration new values, in place."""
    for name, value, holder, key in list(_numbers("", vars(text))):
        if (name, value) not in values:
            continue
        if holder is vars(text):
            setattr(text, key, values[name, value])
        else:
            holder[key] = values[name, value]


def _numbers(name: str, holder: Any) -> Iterator[tuple[str, int, Any, Any]]:
    """(name, whole number, what holds it, its key there), also of numbers within dictionaries and lists.

    An item of a list, such as a value for every layer, has the name of the list.
    """
    items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
    for key, value in list(items):
        own = key if isinstance(holder, Mapping) else name
        if not isinstance(own, str) or own.startswith("_") or own.endswith(IDS):
            continue
        if isinstance(value, list) and any(isinstance(item, float) for item in value):
            continue
        if isinstance(value, (dict, list)):
            yield from _numbers(own, value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield own, value, holder, key
