"""All mutants of a module: Cosmic Ray's operators where they matter for numbers, and six of our own.

Of the many replacements of an operator the nearest are taken: the next bound and the negation of a comparison, the
inverse of an arithmetic operator. Left out is what no test of numbers can see: annotations, options of classes,
`strict=True` of `zip`, the decorator `cache`.
"""

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast, is_number
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Number
from parso.tree import NodeOrLeaf

BINARY = (
    *("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul"),
    *("BitOr_BitAnd", "BitAnd_BitOr", "RShift_LShift", "LShift_RShift"),
)
COMPARISONS = (
    *("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt"),
    *("Is_IsNot", "IsNot_Is"),
)
UNARY = ("USub_UAdd", "Delete_Not", "Delete_Invert")
OTHERS = (
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "RemoveDecorator", "ZeroIterationForLoop"),
)
SWAPPED = {
    name: other
    for pair in ("min max", "any all", "minimum maximum", "floor ceil", "argmin argmax", "left right")
    for name, other in (pair.split(), pair.split()[::-1])
}
AUGMENTED = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "&=": "|=", "|=": "&="}
NUMERIC = {
    *("abs", "square", "sqrt", "exp", "log", "clamp", "clip", "cumsum"),
    *("sum", "mean", "median", "sort", "sorted", "detach", "max", "min"),
}
"""Methods and functions that a mutant leaves out, besides the functions of the module itself."""


OPPOSITE = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


class _Own(Operator):  # type: ignore[misc]
    """An operator with one mutation per node."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if self.fits(node):
            yield node.start_pos, node.end_pos

    def fits(self, node: NodeOrLeaf) -> bool:
        raise NotImplementedError

    @classmethod
    def examples(cls) -> Iterable[Any]:
        return ()


class ScaledNumber(_Own):
    """Integers plus and minus one, floats times and through two: ±1 would miss no threshold of 1e-6."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if is_number(node):
            yield node.start_pos, node.end_pos
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        value = ast.literal_eval(node.value)
        changed = (value * 2, value / 2) if isinstance(value, float) and value else (value + 1, value - 1)
        return Number(repr(changed[index]), node.start_pos, prefix=node.prefix or " ")


class SwappedName(_Own):
    """min ↔ max, any ↔ all, and the like, also as names of arguments."""

    def fits(self, node: NodeOrLeaf) -> bool:
        return (
            node.type == "name" and node.value in SWAPPED and node.parent.type in ("trailer", "atom_expr", "argument")
        )

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.value = SWAPPED[node.value]
        return node


class OtherAssignment(_Own):
    """+= ↔ −=, and the like."""

    def fits(self, node: NodeOrLeaf) -> bool:
        return node.type == "operator" and node.value in AUGMENTED

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.value = AUGMENTED[node.value]
        return node


class DroppedStatement(_Own):
    """A call for its effect, or an augmented assignment, becomes `pass`."""

    def fits(self, node: NodeOrLeaf) -> bool:
        if node.parent is None or node.parent.type != "simple_stmt" or node.parent.children[0] is not node:
            return False
        is_call = node.type == "atom_expr" and node.children[-1].children[0].value == "("
        is_augmented = node.type == "expr_stmt" and getattr(node.children[1], "value", None) in AUGMENTED
        return is_call or is_augmented

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        return _parsed("pass", node)


class DroppedCall(_Own):
    """`x.clamp(…)` and `_clamped(x, …)` become `x`."""

    def __init__(self, own: set[str]) -> None:
        self._own = own

    def fits(self, node: NodeOrLeaf) -> bool:
        if (
            node.type != "atom_expr"
            or node.children[-1].type != "trailer"
            or node.children[-1].children[0].value != "("
        ):
            return False
        called = node.children[-2]
        if called.type == "trailer":
            is_numpy = len(node.children) == 3 and getattr(node.children[0], "value", "") in (
                "np",
                "torch",
                "math",
                "F",
            )
            name = called.children[1].value if called.children[0].value == "." else ""
            return name in NUMERIC and (not is_numpy or _first_argument(node) is not None)
        return called.value in NUMERIC | self._own and _first_argument(node) is not None

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        first = _first_argument(node)
        by_module = getattr(node.children[0], "value", "") in ("np", "torch", "math", "F") and len(node.children) == 3
        if node.children[-2].type != "trailer" or by_module:
            assert first is not None
            code = "(" + first.get_code(include_prefix=False) + ")"
        else:
            code = "".join(child.get_code(include_prefix=i > 0) for i, child in enumerate(node.children[:-2]))
        return _parsed(code, node)


class DroppedSubscript(_Own):
    """`x[rows]` becomes `x`."""

    def fits(self, node: NodeOrLeaf) -> bool:
        return (
            node.type == "atom_expr"
            and node.children[-1].type == "trailer"
            and node.children[-1].children[0].value == "["
        )

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        return _parsed(node.get_code(include_prefix=False)[: -len(node.children[-1].get_code())], node)


def _parsed(code: str, instead_of: NodeOrLeaf) -> NodeOrLeaf:
    found = parso.parse(code).children[0]
    found.get_first_leaf().prefix = instead_of.get_first_leaf().prefix
    return found


def _first_argument(call: NodeOrLeaf) -> NodeOrLeaf | None:
    given = call.children[-1].children[1]
    first = given.children[0] if given.type == "arglist" else given
    return None if first.type in ("argument", "operator") else first


@dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    line: str
    """The changed line without its indentation, as it is."""
    becomes: str
    number: int
    """Of the line, from 1."""
    source: str
    """The whole module, changed."""


def mutants_of(source: str) -> list[Mutant]:
    """Returns every mutant of a module once, in the order of its lines."""
    tree = ast.parse(source)
    skipped, operators = _never_run(tree), _binary_places(tree)
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes = list(ast_nodes(get_ast(source)))
    found: list[Mutant] = []
    meanings = {_meaning(source), ""}
    for operator in _operators(own):
        is_binary = type(operator).__name__.startswith("ReplaceBinaryOperator")
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(places):
            if any(first <= start < end for first, end in skipped):
                continue
            if is_binary and not any(first <= start < end for first, end in operators):
                continue
            changed = mutate_code(source, operator, occurrence)
            if changed is None or (meaning := _meaning(changed)) in meanings:
                continue
            meanings.add(meaning)
            found.append(_mutant(source, changed))
    return sorted(found, key=lambda mutant: (mutant.number, mutant.becomes))


def _operators(own: set[str]) -> Iterator[Operator]:
    names = [f"ReplaceBinaryOperator_{name}" for name in BINARY]
    names += [f"ReplaceComparisonOperator_{name}" for name in COMPARISONS]
    names += [f"ReplaceUnaryOperator_{name}" for name in UNARY]
    for name in (*names, *OTHERS):
        yield get_operator(f"core/{name}")()
    yield from (
        ScaledNumber(),
        SwappedName(),
        OtherAssignment(),
        DroppedStatement(),
        DroppedCall(own),
        DroppedSubscript(),
    )


Place = tuple[tuple[int, int], tuple[int, int]]


def _place(node: Any) -> Place:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _never_run(tree: ast.Module) -> list[Place]:
    """Places of annotations and types, of bases and decorators of classes, and of what the module's text names."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found += [
                ((part.lineno, 0), _place(part)[1]) for part in node.decorator_list if ast.unparse(part) == "cache"
            ]
        if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
            found.append(_place(node.annotation))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            found.append(_place(node.returns))
        elif isinstance(node, ast.ClassDef):
            found += [_place(part) for part in (*node.bases, *node.keywords, *node.decorator_list)]
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            found.append(_place(node.value))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if node.col_offset == 0 and names and names[0][0].isupper() and not names[0].isupper():
                found.append(_place(node.value))
    return found


def _binary_places(tree: ast.Module) -> list[Place]:
    """Places between the operands of binary operators: `*` and `/` also separate parameters."""
    return [(_place(node.left)[1], _place(node.right)[0]) for node in ast.walk(tree) if isinstance(node, ast.BinOp)]


class _Negations(ast.NodeTransformer):
    """Writes `not a < b` as `a >= b`."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        inner = node.operand
        is_simple = isinstance(inner, ast.Compare) and len(inner.ops) == 1 and type(inner.ops[0]) in OPPOSITE
        if not isinstance(node.op, ast.Not) or not is_simple:
            return node
        return ast.Compare(inner.left, [OPPOSITE[type(inner.ops[0])]()], inner.comparators)  # type: ignore[attr-defined]


def _meaning(source: str) -> str:
    """The syntax tree as text. Empty if there is none."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return ""
    return ast.dump(_Negations().visit(ast.parse(source)))


def _mutant(source: str, changed: str) -> Mutant:
    before, after = source.splitlines(), changed.splitlines()
    for tag, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            shown = (" ".join(line.strip() for line in lines) for lines in (before[i:j], after[k:m]))
            return Mutant(*shown, number=i + 1, source=changed)
    raise AssertionError("a mutant differs from its source")
