"""The form of a parsed answer: trees of numbers, symbols and operations, in chains of relations."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


class NotParsedError(ValueError):
    """The text is not in the grammar."""


class Refusal(ValueError):
    """Why an answer is not the reference."""


@dataclass(frozen=True)
class Num:
    value: Fraction
    decimals: int | None = None
    """Digits after the point. None: the number is written without one."""
    digits: int = 0
    """Significant digits."""
    repeating: bool = False


@dataclass(frozen=True)
class Sym:
    name: str


@dataclass(frozen=True)
class UnitWords:
    words: str


@dataclass(frozen=True)
class Op:
    """``name`` is one of ``+ * / ^ neg pm mp root log abs ! binom mod compound`` or the name of a function.

    ``compound`` is a sum of measures: ``2 h 30 min``.
    """

    name: str
    args: tuple["Tree", ...]


@dataclass(frozen=True)
class Brackets:
    """A tuple or an interval. ``opening`` is ``(`` or ``[``, ``closing`` ``)`` or ``]``."""

    opening: str
    closing: str
    items: tuple["Tree", ...]

    @property
    def kind(self) -> str:
        return self.opening + self.closing


@dataclass(frozen=True)
class FiniteSet:
    """A set that names its members."""

    items: tuple["Tree", ...]


@dataclass(frozen=True)
class Builder:
    """The set of all values of an element for which a condition holds."""

    element: "Tree"
    condition: "Statement"
    domain: "Tree | None" = None
    """The element's domain. None: ℝ."""


@dataclass(frozen=True)
class Cases:
    """A value for each of several conditions. None: where no other holds."""

    pieces: tuple[tuple["Tree", "Statement | None"], ...]


@dataclass(frozen=True)
class Join:
    """``name`` is ``cup``, ``cap`` or ``setminus``."""

    name: str
    items: tuple["Tree", "Tree"]


@dataclass(frozen=True)
class Ratio:
    items: tuple["Tree", ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple["Tree", ...], ...]


@dataclass(frozen=True)
class Based:
    """A numeral in another base than ten."""

    digits: str
    base: str


@dataclass(frozen=True)
class Clock:
    """A time of day. ``minutes`` after midnight or noon, ``half`` is ``am`` or ``pm``."""

    minutes: int
    half: str


@dataclass(frozen=True)
class Chain:
    """``side relation side …``. A side that is only a name may have no tree."""

    sides: tuple["Tree | None", ...]
    relations: tuple[str, ...] = ()
    labels: frozenset[int] = frozenset()
    """Indices of sides that are a plain name: ``x``, ``f(41)``, ``AB``."""


@dataclass(frozen=True)
class Statement:
    """``separator`` is ``,``, ``or``, ``and``, or empty for a single item."""

    items: tuple[Chain, ...]
    separator: str = ""

    @property
    def trees(self) -> list["Tree"]:
        """The sides of all its items."""
        return [side for chain in self.items for side in chain.sides if side is not None]

    def with_trees(self, change: Callable[["Tree"], "Tree"]) -> "Statement":
        """The statement with every side changed."""
        chains = (
            dataclasses.replace(chain, sides=tuple(side and change(side) for side in chain.sides))
            for chain in self.items
        )
        return dataclasses.replace(self, items=tuple(chains))


MINUS_ONE = Num(Fraction(-1), digits=1)
REAL_LINE = Brackets("(", ")", (Op("neg", (Sym("infty"),)), Sym("infty")))
Tree = Num | Sym | UnitWords | Op | Brackets | FiniteSet | Builder | Cases | Join | Ratio | Matrix | Based | Clock


CONSTANTS = frozenset(("pi", "e", "i", "infty"))


def symbols(tree: Tree) -> frozenset[str]:
    """The free symbols of a tree. The constants are not among them."""
    return frozenset(part.name for part in parts(tree) if isinstance(part, Sym)) - CONSTANTS


def children(tree: Tree) -> tuple[Tree, ...]:
    """The trees directly in a tree."""
    match tree:
        case Op():
            return tree.args
        case Brackets() | FiniteSet() | Ratio() | Join():
            return tree.items
        case Matrix():
            return tuple(itertools.chain(*tree.rows))
    return ()


def parts(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in children(tree):
        yield from parts(child)


def changed(tree: Tree, change: Callable[[Tree], Tree]) -> Tree:
    """The tree with every tree directly in it changed."""
    match tree:
        case Op():
            return Op(tree.name, tuple(map(change, tree.args)))
        case Brackets() | FiniteSet() | Ratio() | Join():
            return dataclasses.replace(tree, items=tuple(map(change, tree.items)))  # type: ignore[arg-type]
        case Matrix():
            return Matrix(tuple(tuple(map(change, row)) for row in tree.rows))
    return tree


def replaced(tree: Tree, name: str, by: Tree) -> Tree:
    """The tree with another tree in place of one of its symbols."""
    return by if tree == Sym(name) else changed(tree, lambda part: replaced(part, name, by))
