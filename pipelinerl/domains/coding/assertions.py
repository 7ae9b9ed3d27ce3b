"""Splits assertions into calls of the tested function and a check of their values, so that no program sees both.

``assert set(f([1, 2])) == {2}`` becomes the expression ``f([1, 2])`` and the check ``assert set(_values[0]) == {2}``.
"""

import ast
import builtins
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipelinerl.errors import DomainError


class Assertion(NamedTuple):
    """One assertion, split."""

    expressions: list[str]
    """Calls of the function, in order."""
    check: str
    """The assertion with ``_values[i]`` in place of each call."""


class Calls(ast.NodeTransformer):
    """Replaces the calls of a function, except in lambdas and comprehensions, whose variables they may depend on."""

    def __init__(self, function: str):
        self.function = function
        self.expressions: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if first_name(node) != self.function:
            return self.generic_visit(node)
        self.expressions.append(ast.unparse(node))
        return ast.parse(f"_values[{len(self.expressions) - 1}]", mode="eval").body

    def leave(self, node: ast.AST) -> ast.AST:
        return node

    visit_Lambda = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = leave


def parse_assertion(assertion: str, function: str) -> Assertion:
    """Splits one assertion.

    Raises:
        DomainError: it is not an assertion, or uses the function other than by plain calls.
    """
    calls = Calls(function)
    (statement, *others) = parsed(assertion)
    if not isinstance(statement, ast.Assert) or others:
        raise DomainError(f"not an assertion: {assertion[:100]!r}")
    check = calls.visit(statement)
    if not calls.expressions or function in names(check):
        raise DomainError(f"an assertion that does not call {function!r} plainly: {assertion[:100]!r}")
    return Assertion(calls.expressions, ast.unparse(check))


def of_list(tests: list[str], setup: str) -> dict[str, Any]:
    """Reads MBPP's tests: assertions, perhaps with imports before them.

    Args:
        tests: lines of code.
        setup: code that runs before them.
    Returns:
        ``{"asserts", "fn_name", "setup"}``.
    Raises:
        DomainError: there is other code, or the assertions call no common function.
    """
    statements = [statement for test in tests for statement in parsed(test)]
    asserts = [statement for statement in statements if isinstance(statement, ast.Assert)]
    imports = [statement for statement in statements if isinstance(statement, ast.Import | ast.ImportFrom)]
    before = [*parsed(setup), *imports]
    if len(asserts) + len(imports) < len(statements):
        raise DomainError(f"tests that are not assertions: {tests[0][:100]!r}")
    known = {*dir(builtins), *(name for statement in before for name in changed_names(statement))}
    called = [[name for name in called_names(one) if name not in known] for one in asserts]
    common = [name for name in (called or [[]])[0] if all(name in each for each in called)]
    if not common:
        raise DomainError("no function that every assertion calls")
    return {"asserts": code_of(asserts), "fn_name": common[0], "setup": "\n".join(code_of(before))}


def of_check(test: str, function: str) -> dict[str, Any]:
    """Reads HumanEval's tests: ``def check(candidate)`` with assertions. Other code becomes the setup.

    Args:
        test: the code of the tests.
        function: name of the candidate.
    Returns:
        As `of_list`.
    Raises:
        DomainError: there is no such function, or it uses the candidate outside of its assertions.
    """
    statements = parsed(test)
    checks = [one for one in statements if isinstance(one, ast.FunctionDef) and one.name == "check" and one.args.args]
    if not checks:
        raise DomainError("no function `check(candidate)`")
    for node in ast.walk(checks[0]):
        if isinstance(node, ast.Name) and node.id == checks[0].args.args[0].arg:
            node.id = function
    asserts = [one for one in checks[0].body if isinstance(one, ast.Assert)]
    kept = [one for one in (*statements, *checks[0].body) if not isinstance(one, ast.Expr)]
    before = [one for one in kept if one not in (checks[0], *asserts)]
    if strange := [one for one in before if function in names(one)]:
        raise DomainError(f"tests that are not assertions: {ast.unparse(strange[0])[:100]!r}")
    asserts = [one for one in asserts if function in names(one)]
    return {"asserts": code_of(asserts), "fn_name": function, "setup": "\n".join(code_of(before))}


def statements_of(setup: str, expressions: Sequence[str] | None = None) -> list[str]:
    """Returns the statements of a setup: all, or the imports and those that the expressions need.

    The others may hold what an assertion expects, so they must not run beside the program.
    """
    statements = parsed(setup)
    if expressions is None:
        return code_of(statements)
    needed = {name for expression in expressions for statement in parsed(expression) for name in names(statement)}
    kept: list[ast.stmt] = []
    for statement in reversed(statements):
        if isinstance(statement, ast.Import | ast.ImportFrom) or needed & changed_names(statement):
            kept.insert(0, statement)
            needed |= names(statement)
    return code_of(kept)


def parsed(code: str) -> list[ast.stmt]:
    """Raises ``DomainError`` if it is not Python."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DomainError(f"tests that are not Python: {code[:100]!r} ({error})") from error


def first_name(node: ast.AST | None) -> str | None:
    """Returns the name at the beginning of a chain of calls, such as `Solution` in ``Solution().f(1)``."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def called_names(node: ast.AST) -> list[str]:
    """Names of the functions that are called, the outermost first."""
    return [each.func.id for each in ast.walk(node) if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]


def changed_names(statement: ast.stmt) -> set[str]:
    """Names that a statement binds, or whose objects it changes, as ``root.left = Node(2)`` and ``root.add(3)`` do."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    changed = [node for node in ast.walk(statement) if isinstance(getattr(node, "ctx", None), ast.Store)]
    changed += [node.value for node in ast.walk(statement) if isinstance(node, ast.Expr)]
    return {name for node in changed if (name := first_name(node))}


def code_of(statements: Sequence[ast.AST]) -> list[str]:
    return [ast.unparse(statement) for statement in statements]
