r"""Whether a parsed answer is the parsed reference.

The kind must be the same: a number, a list, a tuple, a set, an interval, a matrix, an equation or an inequality.
Numbers are compared exactly if they are rational, else to ``values.DIGITS`` digits, and expressions at fixed points of
their symbols. A ``Refusal`` holds the reason why an answer is not the reference.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

from pipelinerl.domains.math.answers import units
from pipelinerl.domains.math.answers.regions import Region, complement, half_lines, intersection, normalised, union
from pipelinerl.domains.math.answers.trees import (
    MINUS_ONE,
    Based,
    Brackets,
    Builder,
    Cases,
    Chain,
    Clock,
    FiniteSet,
    Join,
    Matrix,
    Num,
    Op,
    Ratio,
    Refusal,
    Statement,
    Sym,
    Tree,
    UnitWords,
    changed,
    children,
    parts,
    replaced,
    symbols,
)  # fmt: skip
from pipelinerl.domains.math.answers.units import Measure
from pipelinerl.domains.math.answers.values import DIGITS, NoValueError, TooLargeError, exact, numeric

TOLERANCE = mpmath.mpf(10) ** -30
MIN_DIGITS = 6
"""A decimal with at least this many digits after the point, and in all, stands for the value that it rounds."""
MIN_POINTS = 3
"""Points at which two expressions must have values to be compared. At fewer, different ones may agree."""
MAX_SPAN = 1500
"""Decimal places between an answer's largest and smallest number. Beyond, only rational answers are compared."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How strictly an answer is judged."""

    strict: bool = True
    """Kinds of brackets and names of variables matter."""
    operators: bool = False
    """Operations that an answer leaves undone are computed."""


STATED = Rules(operators=True)
"""For the sides of an equation within an answer: `6 \\cdot 7 = 42`."""


@dataclass(frozen=True)
class Equation:
    left: Tree | None
    right: Tree
    named: bool
    """Whether the left side is a plain name."""


@dataclass(frozen=True)
class Inequality:
    """An inequality that is not a region of the real line: ``left`` is less than ``right``."""

    left: Tree
    right: Tree
    closed: bool


@dataclass(frozen=True)
class Listing:
    items: tuple["Value", ...]
    names: tuple[Tree | None, ...] = ()
    braces: bool = False
    alternatives: bool = False
    """Whether `or` stands between the items."""


Value = Tree | Region | Equation | Inequality | Listing


def same(answer: Statement, reference: Statement, rules: Rules) -> None:
    """Raises ``Refusal`` unless the answer is the reference."""
    answer = with_parameter_of(answer, reference)
    with mpmath.workdps(DIGITS):
        answer, reference = in_standard_form(answer), in_standard_form(reference)
        wanted = meaning(reference)
        given = meaning(answer, wanted)
        undone = isinstance(given, Op | Num) and is_one_number(wanted) and is_undone(given)
        if isinstance(wanted, Region | Brackets | Join) and not any(map(is_undone, numbers_in(reference))):
            undone = any(map(is_undone, numbers_in(answer)))
        if undone and not rules.operators:
            raise Refusal("arithmetic that was left undone")
        if not equal(given, wanted, rules):
            raise Refusal("")


def numbers_in(statement: Statement) -> Iterator[Tree]:
    """Yields the sides, ends and members of a statement that are compared as numbers."""
    trees = statement.trees
    while trees:
        tree = trees.pop()
        if isinstance(tree, Brackets | FiniteSet | Join):
            trees += tree.items
        elif isinstance(tree, Builder):
            yield from numbers_in(tree.condition)
        else:
            yield tree


def with_parameter_of(answer: Statement, reference: Statement) -> Statement:
    """Gives an integer (``n\\pi, n \\in \\mathbb{Z}``) and a constant ``C`` the name that the reference has."""
    in_answer, in_reference = (frozenset().union(*map(symbols, side.trees)) for side in (answer, reference))
    for constant in in_answer - in_reference:
        other_case = constant[0].swapcase() + constant[1:]
        if constant[0] in "cC" and other_case in in_reference - in_answer:
            answer = answer.with_trees(lambda tree: replaced(tree, constant, Sym(other_case)))  # noqa: B023 — used at once
    theirs, ours = _parameters(reference), _parameters(answer)
    if len(theirs) != 1 or len(ours) != 1 or theirs == ours:
        return answer
    ((name, domain),), ((other, other_domain),) = theirs.items(), ours.items()
    if domain != other_domain or any(Sym(name) in parts(tree) for tree in answer.trees):
        return answer
    return answer.with_trees(lambda tree: replaced(tree, other, Sym(name)))


def in_standard_form(statement: Statement) -> Statement:
    """Writes ``an + b`` with an integer ``n`` such that ``0 <= b < a``: ``2n + 3`` and ``2n - 1`` are one set."""
    integers = [name for name, domain in _parameters(statement).items() if domain == Sym("mathbb Z")]
    if len(integers) != 1:
        return statement
    with_signs = [
        one.with_trees(lambda tree: _with_sign(tree, sign)).items[0]  # noqa: B023 — used at once
        for one in (Statement((chain,)) for chain in statement.items)
        for sign in ((1, -1) if any(map(_has_sign, one.trees)) else (1,))
    ]
    signed = dataclasses.replace(statement, items=tuple(with_signs))
    return signed.with_trees(lambda tree: _shifted(tree, integers[0]))


def _shifted(tree: Tree, name: str) -> Tree:
    names = sorted(symbols(tree))
    if name not in names or not isinstance(tree, Op):
        return tree
    try:
        first, second, third = (numeric(tree, {**_values_at(0, names), name: n}, real=True) for n in (0, 1, 2))
    except (NoValueError, TooLargeError):
        return tree
    slope = second - first
    if slope == 0 or not _near(third - second, slope):
        return tree
    sign = 1 if slope > 0 else -1
    shift = -int(mpmath.floor(first / abs(slope) + TOLERANCE))
    moved = Op("+", (Op("*", (Num(Fraction(sign)), Sym(name))), Num(Fraction(sign * shift))))
    return replaced(tree, name, moved)


def _parameters(statement: Statement) -> dict[str, Tree | None]:
    """Returns name → domain, where a statement gives domains of names besides its values (``n \\in \\mathbb{Z}``)."""
    if len(statement.items) < 2:
        return {}
    return {
        chain.sides[0].name: chain.sides[1]
        for chain in statement.items
        if chain.relations == ("in",) and isinstance(chain.sides[0], Sym) and isinstance(chain.sides[1], Sym)
    }


# --- what an answer means


def meaning(answer: Statement, reference: Value | None = None) -> Value:
    """Returns the value of an answer. Names are dropped if ``reference`` is given and has none."""
    values = [chain_meaning(chain, reference) for chain in answer.items]
    if len(values) == 1:
        return _as_set(values[0])
    if answer.separator in ("or", "and") and all(isinstance(value, Region) for value in values):
        regions = [value for value in values if isinstance(value, Region)]
        common = functools.reduce(intersection, regions)
        if answer.separator == "and" and (common.spans or reference is not None):
            return common  # a reference with `x < -1 and x > 1` means both
        return functools.reduce(union, regions)
    names = tuple(map(_name_of, answer.items))
    items = _expanded(value.right if isinstance(value, Equation) and value.named else value for value in values)
    return Listing(items, names if len(names) == len(items) else (), alternatives=answer.separator == "or")


def _expanded(values: Iterable[Value]) -> tuple[Value, ...]:
    """Returns the values. A value with ``\\pm`` becomes two."""
    sets = map(_as_set, values)
    lists = [one.items if isinstance(one, Listing) and not one.braces else (one,) for one in sets]
    return tuple(itertools.chain(*lists))


def _name_of(chain: Chain) -> Tree | None:
    """Returns the left side of an equation if it is a plain name, or an expression of names."""
    first = chain.sides[0]
    is_name = set(chain.relations) == {"="} and first is not None and (0 in chain.labels or bool(symbols(first)))
    return first if is_name else None


def _as_set(value: Value) -> Value:
    if isinstance(value, Op) and _has_sign(value):
        return Listing(tuple(_with_sign(value, sign) for sign in (1, -1)), braces=False)
    if isinstance(value, Equation) and (expanded := _as_set(value.right)) is not value.right and value.named:
        return expanded
    if isinstance(value, FiniteSet):
        return Listing(_expanded(value.items), braces=True)
    if isinstance(value, Builder) and value.domain is None:
        condition = meaning(value.condition)
        if isinstance(condition, Region) and condition.variable and value.element != Sym(condition.variable):
            raise Refusal("a condition of another variable")
        return condition
    if isinstance(value, Join):
        return _joined(value)
    return value


def _has_sign(tree: Tree) -> bool:
    return any(isinstance(part, Op) and part.name in ("pm", "mp") for part in parts(tree))


def _with_sign(tree: Tree, sign: int) -> Tree:
    tree = changed(tree, lambda part: _with_sign(part, sign))
    if not isinstance(tree, Op) or tree.name not in ("pm", "mp"):
        return tree
    args = tree.args
    last = args[-1] if (sign == 1) == (tree.name == "pm") else Op("neg", (args[-1],))
    return last if len(args) == 1 else Op("+", (args[0], last))


def _joined(join: Join) -> Value:
    left, right = map(_as_set, join.items)
    if isinstance(left, Listing) and isinstance(right, Listing):
        if join.name == "cup":
            return Listing((*left.items, *right.items), braces=True)
        inside = join.name == "cap"
        return Listing(
            tuple(i for i in left.items if any(equal(i, j, STATED) for j in right.items) == inside), braces=True
        )
    first, second = region_of(left), region_of(right)
    if first is None or second is None:
        raise Refusal("sets that cannot be joined")
    if join.name == "setminus":
        second = complement(second)
    return union(first, second) if join.name == "cup" else intersection(first, second)


def chain_meaning(chain: Chain, reference: Value | None) -> Value:
    if not chain.relations:
        assert chain.sides[0] is not None, "a side without relation is parsed"
        return chain.sides[0]
    if chain.relations == ("in",):
        element = chain.sides[0]
        names_only = isinstance(element, Brackets) and all(isinstance(item, Sym) for item in element.items)
        if chain.sides[1] is None or not (isinstance(element, Sym) or names_only or 0 in chain.labels):
            raise Refusal("a statement")
        return _as_set(chain.sides[1])
    if set(chain.relations) <= {"=", "~"}:
        return _equation(chain, reference)
    return _inequality(chain)


def _equation(chain: Chain, reference: Value | None) -> Value:
    """``x = 3``; ``a + b = 42``; ``1/2 = 0.5``; ``\\sqrt 2 \\approx 1.414``."""
    first, last = chain.sides[0], chain.sides[-1]
    exact_sides = chain.relations.index("~") + 1 if "~" in chain.relations else len(chain.sides)
    if reference is not None and not chain.labels and len(set(chain.sides)) == 1:
        raise Refusal("a tautology")
    if chain.relations == ("=",) and isinstance(last, Sym) and 0 not in chain.labels and first is not None:
        return Equation(last, first, named=True) if reference is None or _has_equation(reference) else first
    if reference is None or (_has_equation(reference) and len(chain.relations) == 1):
        last = chain.sides[exact_sides - 1] if exact_sides > 1 else last
        assert last is not None, "a side behind a relation is parsed"
        given = first is not None and not symbols(first) | symbols(last)  # `\\log_2 8 = 3`
        derived = isinstance(first, Sym) and first.name.startswith("\\")
        several = (
            isinstance(first, Brackets | Ratio)
            and isinstance(last, type(first))
            and all(isinstance(item, Sym) for item in first.items)
        )
        return Equation(first, last, named=0 in chain.labels or given or derived or several or isinstance(last, Matrix))
    known = _symbols_of(reference)
    whole = None if first is None or 0 in chain.labels else split(first)[0]
    letters = symbols(whole) if isinstance(whole, Op) and whole.name in UNSOLVED else frozenset()
    if len(letters) == 1 and "".join(letters).islower() and not letters & known:
        raise Refusal("an equation that was left to be solved")
    stated = [
        (index, side)
        for index, side in enumerate(chain.sides)
        if side is not None and not (index < len(chain.sides) - 1 and _names(side, index in chain.labels, known))
    ]
    unnamed = [side for index, side in stated if index < exact_sides]
    rounded = [side for index, side in stated if index >= exact_sides]
    for one, other in itertools.pairwise(unnamed):
        if not equal(_as_set(one), _as_set(other), STATED):
            raise Refusal("two values in one equation")
    if not stated:
        raise Refusal("names without a value")
    if unnamed and not all(_rounds(decimal, unnamed[-1]) for decimal in rounded):
        raise Refusal("two values in one equation")
    takes_exact = unnamed and not (rounded and isinstance(reference, Num) and reference.decimals)
    value = unnamed[-1] if takes_exact else rounded[-1]
    keeps_name = isinstance(reference, Equation) and 0 in chain.labels
    return Equation(first, value, named=True) if keeps_name else value


def _has_equation(value: Value) -> bool:
    return any(isinstance(item, Equation) for item in (value.items if isinstance(value, Listing) else (value,)))


def _names(side: Tree, label: bool, known: frozenset[str]) -> bool:
    """Whether a side of an equation names the value: a plain name, or a side without the reference's symbols."""
    letters = symbols(side)
    if not label and any(isinstance(part, UnitWords) for part in parts(side)):
        return False  # `x = 1 \\text{ hm } x = 2`: the words stand between two statements
    return label or any(name.startswith("\\") for name in letters) or bool(letters and not letters & known)


def _symbols_of(value: Value | None) -> frozenset[str]:
    if isinstance(value, Listing):
        return frozenset().union(*map(_symbols_of, value.items))
    if value is None or isinstance(value, Region | Equation | Inequality):
        return frozenset()
    return symbols(value)


def _rounds(decimal: Tree, value: Tree) -> bool:
    """Whether a decimal is the rounding of a value to the decimal's own digits."""
    if isinstance(decimal, Op) and decimal.name == "neg":
        return _rounds(decimal.args[0], Op("neg", (value,)))
    if not isinstance(decimal, Num):
        return False
    try:
        error = abs(numeric(value, {}, real=True) - mpmath.mpf(decimal.value.numerator) / decimal.value.denominator)
    except NoValueError:
        return False
    return bool(error <= mpmath.mpf(10) ** -(decimal.decimals or 0) * mpmath.mpf("0.5000001"))


def _inequality(chain: Chain) -> Value:
    """Returns a region if every relation compares one variable with a number, else one ``Inequality`` or several."""
    sides = [side for side in chain.sides if side is not None]
    if len(sides) < len(chain.sides) or "=" in chain.relations:
        raise Refusal("a relation of names")
    triples = list(zip(sides[:-1], chain.relations, sides[1:], strict=True))
    regions = [region for triple in triples if (region := _half_line(*triple)) is not None]
    if len(regions) == len(triples):
        return functools.reduce(intersection, regions)
    if not set(chain.relations) <= {"<", "<=", ">", ">="}:
        raise Refusal("a statement")
    pairs = [
        Inequality(*((left, right) if relation[0] == "<" else (right, left)), closed=relation.endswith("="))
        for left, relation, right in triples
    ]
    return pairs[0] if len(pairs) == 1 else Listing(tuple(pairs))


UNSOLVED = ("+", "*", "/", "^", "neg", "abs", "root", "!")
"""Operations on one variable that do not name a value: `2x = 42`, `|x| = 42`."""
MIRRORED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


def _half_line(left: Tree, relation: str, right: Tree) -> Region | None:
    if symbols(right) and not symbols(left):
        left, relation, right = right, MIRRORED.get(relation, relation), left
    variable = left.args[0] if isinstance(left, Op) and left.name == "abs" else left
    if (
        relation not in MIRRORED
        or symbols(right)
        or not isinstance(variable, Sym)
        or variable.name.startswith("mathbb")
    ):
        return None
    try:
        bound = numeric(right, {}, real=True)
    except NoValueError:
        return None
    region = Region(half_lines(relation, bound), variable.name)
    if variable is left:
        return region
    mirrored = Region(half_lines(MIRRORED[relation], -bound), variable.name)
    return union(region, mirrored) if relation[0] == ">" else intersection(region, mirrored)


def region_of(value: Value) -> Region | None:
    if isinstance(value, Region):
        return value
    try:
        if isinstance(value, Brackets) and len(value.items) == 2:
            low, high = (numeric(item, {}, real=True) for item in value.items)
            if low > high or (low == high and value.kind != "[]"):
                return None
            return Region((((low, value.opening == "("), (high, value.closing == "]")),))
        if isinstance(value, Listing) and value.braces:
            points = [numeric(item, {}, real=True) for item in value.items if isinstance(item, Num | Op | Sym)]
            return normalised(((p, False), (p, True)) for p in points) if len(points) == len(value.items) else None
    except NoValueError:
        return None
    return None


# --- equality


def equal(answer: Value, reference: Value, rules: Rules) -> bool:
    if isinstance(answer, Cases) and isinstance(reference, Cases):
        ours, theirs = _pieces(answer), _pieces(reference)
        return len(ours) == len(theirs) and _same_members(ours, theirs, rules)
    if isinstance(answer, Builder) and isinstance(reference, Builder):
        if not (isinstance(answer.element, Sym) and answer.domain == reference.domain):
            return answer == reference
        name, other = answer.element.name, reference.element
        condition = answer.condition.with_trees(lambda tree: replaced(tree, name, other))
        return equal(meaning(condition), meaning(reference.condition), rules)
    if isinstance(reference, Listing):
        return _equal_listings(answer, reference, rules)
    if isinstance(reference, Equation):
        return _equal_equations(answer, reference, rules)
    if isinstance(answer, Equation):
        return answer.named and equal(answer.right, reference, rules)
    if isinstance(reference, Clock) or isinstance(answer, Clock):
        return _equal_times(answer, reference)
    if isinstance(reference, Region) or isinstance(answer, Region) or isinstance(reference, Join):
        return _equal_regions(answer, reference)
    if isinstance(reference, Inequality) or isinstance(answer, Inequality):
        return _equal_inequalities(answer, reference)
    if isinstance(reference, Brackets):
        return _equal_brackets(answer, reference, rules)
    if isinstance(answer, Listing):
        return len(answer.items) == 1 and not answer.braces and equal(answer.items[0], reference, rules)
    if isinstance(reference, Ratio) or isinstance(answer, Ratio):
        return _equal_ratios(answer, reference, rules)
    if isinstance(reference, Based) or isinstance(answer, Based):
        if isinstance(reference, Based) and isinstance(answer, Num):
            return answer.decimals is None and str(answer.value) == reference.digits
        if isinstance(answer, Based) and answer.base == "10" and not isinstance(reference, Based):
            return equal(Num(Fraction(answer.digits)), reference, rules)
        return answer == reference
    left, right = _matrix_of(answer), _matrix_of(reference)
    if isinstance(answer, Brackets) and (column := _column(right)) and answer.kind == "()":
        return equal(answer, Brackets("(", ")", column), rules)
    if left is not None or right is not None:
        return (
            left is not None
            and right is not None
            and len(left.rows) == len(right.rows)
            and _all_equal(children(left), children(right), rules)
        )
    if isinstance(answer, Brackets | FiniteSet | Builder | Cases | Join):
        return False
    return equal_quantities(answer, reference, rules)


def _pieces(cases: Cases) -> list[Listing]:
    """A value and where it holds, for each case."""
    regions = [None if condition is None else meaning(condition) for _, condition in cases.pieces]
    known = [region for region in regions if isinstance(region, Region)]
    rest = complement(functools.reduce(union, known)) if known else Listing(())
    return [
        Listing((value, rest if region is None else region), (Sym("value"), Sym("where")))
        for (value, _), region in zip(cases.pieces, regions, strict=True)
    ]


def _equal_listings(answer: Value, reference: Listing, rules: Rules) -> bool:
    if isinstance(answer, Equation) and answer.named:
        answer = _as_set(answer.right)
    if isinstance(answer, Region):
        region = region_of(reference)
        return region is not None and not rules.strict and _equal_regions(answer, region)
    in_order = len(_letters(reference)) == len(reference.items) > 1  # ``a=3, b=4``, but not ``x_1=3, x_2=4``
    if isinstance(answer, Brackets) and in_order and answer.kind == "()":
        answer = Listing(answer.items)
    if not isinstance(answer, Listing):
        if len(reference.items) != 1:
            return False
        answer = Listing((answer,))
    if in_order and (answer.braces or answer.alternatives):
        return False
    if answer.names and reference.names and None not in (*answer.names, *reference.names):
        pairs = dict(zip(reference.names, reference.items, strict=True))
        if set(pairs) == set(answer.names) and len(pairs) > 1:
            return _all_equal(answer.items, [pairs[name] for name in answer.names], rules)
    if in_order:
        if rules.strict and any(name is not None for name in answer.names):
            return False  # it names others
        return _all_equal(_coordinates(answer), _coordinates(reference), rules)
    if rules.strict and _letters(reference) and not _letters(answer) <= _letters(reference):
        return False
    return _same_members(_members(answer, rules), _members(reference, rules), rules)


def _letters(listing: Listing) -> set[str]:
    """Returns the names of a list's items, without indices."""
    return {name.name.partition("_")[0] for name in listing.names if isinstance(name, Sym)}


def _all_equal(items: Sequence[Value], others: Sequence[Value], rules: Rules) -> bool:
    return len(items) == len(others) and all(equal(a, b, rules) for a, b in zip(items, others, strict=True))


def _members(listing: Listing, rules: Rules) -> list[Value]:
    """Returns the items of a list. In a set, and in a family over the integers, each occurs once."""
    members: list[Value] = []
    for item in listing.items:
        counts = not listing.braces and Sym("mathbb Z") not in listing.items
        if counts or not any(equal(item, other, rules) for other in members):
            members.append(item)
    return members


def _same_members(items: Sequence[Value], others: Sequence[Value], rules: Rules) -> bool:
    """Whether each item has a partner of its own."""
    rest = list(others)
    for item in items:
        at = next((at for at, other in enumerate(rest) if equal(item, other, rules)), None)
        if at is None:
            return False
        del rest[at]
    return not rest


def _equal_equations(answer: Value, reference: Equation, rules: Rules) -> bool:
    if isinstance(reference.left, Brackets) and isinstance(reference.right, Brackets):
        wanted = Listing(reference.right.items, reference.left.items)
        if isinstance(answer, Equation) and isinstance(answer.left, Brackets) and isinstance(answer.right, Brackets):
            answer = Listing(answer.right.items, answer.left.items)
        return _equal_listings(answer, wanted, rules)
    if not isinstance(answer, Equation):
        return (
            reference.named
            and answer != reference.left
            and not isinstance(answer, Inequality | Region)
            and equal(answer, _as_set(reference.right), rules)
        )
    if answer.left is not None and not symbols(answer.left):
        others = [answer.right, *([reference.left] if reference.left is not None else [])]
        if not any(equal(answer.left, other, STATED) for other in others):
            return False  # `4 = 5` states nothing
    solved = reference.named and isinstance(reference.left, Sym) and not symbols(reference.right)
    if isinstance(reference.left, Ratio) and isinstance(answer.left, Ratio) and answer.left != reference.left:
        return False
    if reference.named and answer.named and isinstance(reference.left, Op) and isinstance(answer.left, Op):
        is_number = not symbols(reference.right) and not isinstance(reference.right, Matrix)
        same_name = is_number or equal(answer.left, reference.left, STATED)  # not `f(2x)` for `f(x)`
        return same_name and equal(answer.right, reference.right, rules)
    if answer.left is not None and answer.left == reference.left and equal(answer.right, reference.right, rules):
        return True
    if answer.left is not None and reference.left is not None and not solved:
        difference, other = (
            Op("+", (e.left, Op("neg", (e.right,)))) for e in (answer, reference) if e.left is not None
        )
        if not symbols(difference) - symbols(other) and _proportional(difference, other):
            return True
    is_letter = isinstance(answer.left, Sym) and re.fullmatch(r"[^\\'′]+", answer.left.name)
    may_differ = answer.named and reference.named and not (is_letter and rules.strict)
    return may_differ and equal(answer.right, reference.right, rules)


def _equal_regions(answer: Value, reference: Value) -> bool:
    left, right = region_of(_as_set(answer)), region_of(_as_set(reference))
    if left is None or right is None or (left.variable and right.variable and left.variable != right.variable):
        return False
    ours, theirs = (list(itertools.chain(*normalised(region.spans).spans)) for region in (left, right))
    return len(ours) == len(theirs) and all(
        _near(number, other) and side == other_side
        for (number, side), (other, other_side) in zip(ours, theirs, strict=True)
    )


def _equal_inequalities(answer: Value, reference: Value) -> bool:
    if not (isinstance(answer, Inequality) and isinstance(reference, Inequality)) or answer.closed != reference.closed:
        return False
    one, other = (Op("+", (i.right, Op("neg", (i.left,)))) for i in (answer, reference))
    return _proportional(one, other, positive=True)


def _equal_brackets(answer: Value, reference: Brackets, rules: Rules) -> bool:
    if isinstance(answer, Listing):
        interval = len(reference.items) == 2 and reference.kind != "()"
        if (answer.braces and rules.strict) or answer.alternatives or interval:
            return False
        items: Sequence[Value] = _coordinates(answer)
    elif isinstance(answer, Brackets):
        if rules.strict and answer.kind != reference.kind:
            return False
        items = answer.items
    else:
        items = (_column(_matrix_of(answer)) if reference.kind == "()" else ()) or _point(answer)
    return _all_equal(items, reference.items, rules)


def _coordinates(listing: Listing) -> Sequence[Value]:
    """Returns the items in order. Items named x, y and z are sorted by name."""
    names = [name.name if isinstance(name, Sym) else "" for name in listing.names]
    if not names or len(set(names)) < len(names) or not set(names) <= {"x", "y", "z"}:
        return listing.items
    return [item for _, item in sorted(zip(names, listing.items, strict=True), key=lambda pair: pair[0])]


def _point(value: Value) -> Sequence[Value]:
    """The coordinates of a named point: ``P(1,2)``."""
    match value:
        case Op("*", (Sym(), Brackets() as point)):
            return point.items
    return ()


def _equal_times(answer: Value, reference: Value) -> bool:
    """Whether two times of day are the same. One of them may leave out its half, or count 24 hours."""
    if isinstance(answer, Clock) and isinstance(reference, Clock):
        return answer == reference
    clock, other = (answer, reference) if isinstance(answer, Clock) else (reference, answer)
    assert isinstance(clock, Clock), "one of them is a time"
    numbers = other.items if isinstance(other, Ratio) else (other,)
    if len(numbers) > 2 or not all(isinstance(number, Num) for number in numbers):
        return False
    hour, minute = (*(number.value for number in numbers if isinstance(number, Num)), Fraction(0))[:2]
    if hour <= 12:
        return hour % 12 * 60 + minute == clock.minutes
    return (hour - 12) * 60 + minute == clock.minutes and clock.half == "pm"


def _equal_ratios(answer: Value, reference: Value, rules: Rules) -> bool:
    if not (isinstance(answer, Ratio | Num | Op | Sym) and isinstance(reference, Ratio | Num | Op | Sym)):
        return False
    left, right = (value.items if isinstance(value, Ratio) else (value,) for value in (answer, reference))
    if not rules.operators and any(map(is_undone, left)) and not any(map(is_undone, right)):
        return False
    if max(len(left), len(right)) == 2 and min(len(left), len(right)) == 1:
        given, wanted = (terms[0] if len(terms) == 1 else Op("/", terms) for terms in (left, right))
        return equal_quantities(given, wanted, rules)
    if len(left) != len(right):
        return False
    if Fraction(0) in map(exact, (*left, *right)):
        return all(map(equal_numbers, left, right))
    return all(
        equal_quantities(Op("*", (left[0], b)), Op("*", (right[0], a)), STATED)
        for a, b in zip(left, right, strict=True)
    )


def _matrix_of(value: Value) -> Matrix | None:
    """A matrix, a sum of matrices, or a number times a matrix."""
    if isinstance(value, Matrix) or not isinstance(value, Op):
        return value if isinstance(value, Matrix) else None
    matrices = [_matrix_of(part) for part in value.args]
    left, right = matrices[0], matrices[-1]
    if value.name == "+" and left is not None and right is not None:
        if [len(row) for row in left.rows] != [len(row) for row in right.rows]:
            return None
        rows = zip(left.rows, right.rows, strict=True)
        return Matrix(tuple(tuple(Op("+", pair) for pair in zip(*pairs, strict=True)) for pairs in rows))
    matrix = left or right
    if matrix is None or value.name not in ("neg", "*") or (value.name == "*" and left and right):
        return None
    factor = MINUS_ONE if value.name == "neg" else value.args[1 if left else 0]
    return Matrix(tuple(tuple(_scaled(factor, item) for item in row) for row in matrix.rows))


def _column(matrix: Matrix | None) -> tuple[Tree, ...]:
    """The entries of a column. Empty for another matrix."""
    if matrix is None or len(matrix.rows) < 2 or any(len(row) != 1 for row in matrix.rows):
        return ()
    return tuple(row[0] for row in matrix.rows)


def _scaled(factor: Tree, item: Tree) -> Tree:
    if _is_literal(factor) and _is_literal(item) and (value := exact(Op("*", (factor, item)))) is not None:
        return Num(value)
    return Op("*", (factor, item))


# --- numbers and expressions


def equal_quantities(answer: Tree, reference: Tree, rules: Rules) -> bool:
    if answer == reference:
        return True
    if not rules.operators:
        if _is_literal(split(reference)[0]) and is_undone(answer):
            return False
        if symbols(answer) - symbols(reference):
            return False  # `3x/x`: what the question asks for was not computed
    if not (_has_number(answer) and _has_number(reference)):
        return (
            isinstance(answer, UnitWords)
            and isinstance(reference, UnitWords)
            and answer.words.lower() == reference.words.lower()
        )
    value, measure = split(answer)
    wanted, unit = split(reference)
    return _equal_measured(value, measure, wanted, unit)


def _has_number(tree: Tree) -> bool:
    return any(isinstance(part, Num | Sym) for part in parts(tree))


def _equal_measured(value: Tree, measure: Measure, wanted: Tree, unit: Measure) -> bool:
    if units.unlisted(measure.nouns) != units.unlisted(unit.nouns):
        return False
    percents = [units.is_unit(one, "percent") for one in (measure, unit)]
    if percents[0]:
        value, measure = (value, measure) if percents[1] else (Op("/", (value, Num(Fraction(100)))), Measure())
    if percents[1] and not percents[0]:
        return measure == Measure() and (
            equal_numbers(value, wanted) or equal_numbers(value, Op("/", (wanted, Num(Fraction(100)))))
        )
    degrees = units.is_unit(measure, "degree")
    if degrees and not unit.units and not unit.nouns:
        in_radians = Op("*", (value, UnitWords("degree")))
        return equal_numbers(in_radians, wanted) or (Sym("pi") not in parts(wanted) and equal_numbers(value, wanted))
    if units.is_unit(unit, "degree") and measure == Measure() and Sym("pi") in parts(value):
        return equal_numbers(value, Op("*", (wanted, UnitWords("degree"))))
    if not (measure.units or measure.nouns) or not (unit.units or unit.nouns):
        return equal_numbers(value, wanted)
    if measure.nouns and unit.nouns and not measure.units and not unit.units:
        return bool(measure.nouns & unit.nouns) and equal_numbers(value, wanted)
    factor = units.factor(measure, unit)
    return factor is not None and equal_numbers(value if factor == 1 else Op("*", (value, Num(factor))), wanted)


def split(tree: Tree) -> tuple[Tree, Measure]:
    """Splits a term into its number and its unit."""
    if isinstance(tree, UnitWords):
        return Num(Fraction(1)), units.read(tree.words)
    if isinstance(tree, Op):
        if tree.name == "neg":
            value, measure = split(tree.args[0])
            return (Op("neg", (value,)), measure) if measure != Measure() else (tree, measure)
        if tree.name == "compound":
            (large, measure), (small, smaller) = map(split, tree.args)
            factor = units.factor(smaller, measure) if measure.units and smaller.units else None
            whole = None if factor is None or factor >= 1 else exact(Op("+", (large, Op("*", (small, Num(factor))))))
            return (tree, Measure()) if whole is None else (Num(whole), measure)
        if tree.name in ("*", "/"):
            (left, measure), (right, other) = map(split, tree.args)
            if measure == other == Measure() and not any(isinstance(part, UnitWords) for part in tree.args):
                return tree, Measure()
            one = Num(Fraction(1))
            product = right if left == one and tree.name == "*" else Op(tree.name, (left, right))
            power = Fraction(1 if tree.name == "*" else -1)
            return left if right == one else product, units.combine(measure, other, power)
        if tree.name == "^" and isinstance(tree.args[0], UnitWords) and (exponent := exact(tree.args[1])) is not None:
            words = tree.args[0].words
            if "/" in words:  # `\text{m/s}^2` means m/s²
                return Num(Fraction(1)), units.read(f"{words}^{exponent}")
            return Num(Fraction(1)), units.combine(Measure(), units.read(words), exponent)
    return tree, Measure()


def is_one_number(value: Value) -> bool:
    """Whether a reference is one literal number: ``42``, ``-3/4``, ``2.5`` with or without a unit."""
    if isinstance(value, Region | Equation | Inequality | Listing):
        return isinstance(value, Equation) and value.named and is_one_number(value.right)
    return _is_literal(split(value)[0])


def _is_literal(tree: Tree) -> bool:
    if isinstance(tree, Op) and tree.name in ("neg", "/"):
        return all(_is_literal(part) for part in tree.args)
    return isinstance(tree, Num)


def is_undone(tree: Tree) -> bool:
    """Whether a sum, difference or product of literal numbers is left in a term: ``40 + 2``, ``\\sqrt{4 + 5}``."""
    for part in parts(split(tree)[0]):
        if isinstance(part, Op) and part.name in ("+", "*"):
            adds_zero = part.name == "+" and any(isinstance(arg, Num) and arg.value == 0 for arg in part.args)
            if adds_zero or all(map(_is_literal, part.args)):
                return True
    return False


def equal_numbers(answer: Tree, reference: Tree) -> bool:
    """Whether two trees without units have the same value at every point where both have one."""
    left, right = exact(answer), exact(reference)
    if left is not None and right is not None:
        return left == right or _stands_for(answer, reference) or _stands_for(reference, answer)
    names = sorted(symbols(answer) | symbols(reference))
    inner = itertools.chain(parts(answer), parts(reference))
    has_bare_log = any(isinstance(part, Op) and part.name == "log" and len(part.args) == 1 for part in inner)
    bases = (10, 0) if has_bare_log else (10,)
    if any(_agree_at_points(answer, reference, names, base) for base in bases):
        return True
    return _stands_for(answer, reference) or _stands_for(reference, answer)


def _is_real(*trees: Tree) -> bool:
    return not any(part == Sym("i") for tree in trees for part in parts(tree))


def _stands_for(decimal: Tree, value: Tree) -> bool:
    """Whether a decimal with many digits is the rounding of a value that is no decimal itself."""
    literal = decimal.args[0] if isinstance(decimal, Op) and decimal.name == "neg" else decimal
    if (
        not isinstance(literal, Num)
        or not literal.decimals
        or literal.repeating
        or min(literal.decimals, literal.digits) < MIN_DIGITS
    ):
        return False
    return not any(isinstance(part, Num) and part.decimals for part in parts(value)) and _rounds(decimal, value)


def _near(left: Any, right: Any) -> bool:
    if mpmath.isinf(left) or mpmath.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= TOLERANCE * max(abs(left), abs(right), mpmath.mpf(10) ** -20))


def _near_with_more_digits(answer: Tree, reference: Tree, names: list[str], number: int, base: int) -> bool:
    """Compares once more with as many digits as tell apart the largest and the smallest number on the way.

    ``\\tanh 1000`` and ``1`` are the same to 60 digits.
    """
    real = _is_real(answer, reference)
    at = _values_at(number, names)
    bits = [0]
    for tree in (answer, reference):
        numeric(tree, at, real=real, log_base=base, bits=bits)
    span = int(max(bits) * math.log10(2)) + 1
    if span > MAX_SPAN:
        raise TooLargeError("numbers that are too far apart to be compared")
    with mpmath.workdps(DIGITS + 3 * span):
        at = _values_at(number, names)
        left, right = (numeric(tree, at, real=real, log_base=base) for tree in (answer, reference))
        if mpmath.isinf(left) or mpmath.isinf(right):
            return bool(left == right)
        return bool(abs(left - right) <= max(abs(left), abs(right), 1) * mpmath.mpf(10) ** -(DIGITS // 2 + 2 * span))


POINTS = (
    ("1.37", "0.71", "2.93", "0.43", "1.91"),
    ("2.19", "3.07", "0.57", "1.61", "0.89"),
    ("0.67", "1.79", "1.13", "2.41", "3.31"),
    ("-1.53", "-0.83", "-2.27", "-1.19", "-0.47"),
    ("-0.59", "1.43", "-1.87", "0.77", "-2.63"),
    ("1.73", "-2.11", "0.97", "-0.61", "1.27"),
    ("0.43", "2.93", "0.71", "1.37", "2.17"),
    ("0.89", "1.61", "3.57", "2.07", "1.19"),
    ("7", "3", "4", "2", "5"),
    ("2", "5", "7", "3", "4"),
    ("11", "6", "3", "5", "2"),
)


def _values_at(number: int, names: list[str]) -> dict[str, Any]:
    return {name: mpmath.mpf(POINTS[number][i % 5]) + (i // 5) for i, name in enumerate(names)}


def _pairs_at_points(one: Tree, other: Tree, names: list[str], base: int, *, real: bool) -> dict[int, tuple[Any, Any]]:
    """Number of a point → the values of both trees there. Points where one has no value are left out."""
    pairs: dict[int, tuple[Any, Any]] = {}
    for number in range(len(POINTS) if names else 1):
        at = _values_at(number, names)
        with contextlib.suppress(NoValueError):
            first, second = (numeric(tree, at, real=real, log_base=base) for tree in (one, other))
            pairs[number] = (first, second)
    return pairs


def _agree_at_points(answer: Tree, reference: Tree, names: list[str], base: int) -> bool:
    pairs = _pairs_at_points(answer, reference, names, base, real=_is_real(answer, reference))
    if len(pairs) < (MIN_POINTS if names else 1) or not all(_near(*pair) for pair in pairs.values()):
        return False
    return all(_near_with_more_digits(answer, reference, names, number, base) for number in list(pairs)[:MIN_POINTS])


def _proportional(one: Tree, other: Tree, *, positive: bool = False) -> bool:
    """Whether one expression is a constant, not zero, times the other."""
    names = sorted(symbols(one) | symbols(other))
    if not names:
        return False
    pairs = _pairs_at_points(one, other, names, 10, real=True).values()
    ratios = [a / b for a, b in pairs if b != 0]
    if len(ratios) < MIN_POINTS or any(a != 0 for a, b in pairs if b == 0):
        return False
    return all(_near(ratio, ratios[0]) for ratio in ratios) and ratios[0] != 0 and (ratios[0] > 0 or not positive)
