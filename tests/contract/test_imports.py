"""The import rule: who may import whom, no circles, and who may load torch, vllm or deepspeed."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipelinerl"

LAYERS = (
    ("errors", "host", "records", "config", "rollouts", "chat"),
    ("streams", "world", "membership", "llm", "async_llm", "state", "observability", "agents", "testing"),
    ("archive", "redis_server", "inspect", "weights"),
    ("domains", "verifier", "sandbox", "tiny_model", "plan", "utils", "countdown_utils"),
    ("actor", "preprocess", "finetune", "inference", "environments"),
    ("launcher", "replay"),
    ("launch", "ledger", "migrate", "render", "status", "evaluate"),
)
"""A folder (or module beside them) may import from its own layer and those above it in this list, without circles.
Nothing imports a `__main__`, which may therefore import anything."""
ROLES = ("actor", "preprocess", "finetune", "inference", "verifier", "environments", "redis_server")
LIGHT = (
    "pipelinerl.launch",
    "pipelinerl.launcher.program",
    "pipelinerl.launcher.domain_check",
    "pipelinerl.inspect.status",
    "pipelinerl.state",
    "pipelinerl.streams",
    "pipelinerl.world",
    "pipelinerl.records",
    "pipelinerl.config.load",
    "pipelinerl.config.rules",
    "pipelinerl.observability.role",
    "pipelinerl.observability.metrics",
    "pipelinerl.rollouts",
    "pipelinerl.llm",
    "pipelinerl.async_llm",
    "pipelinerl.actor.role",
    "pipelinerl.actor.workers",
)
HEAVY = ("torch", "vllm", "deepspeed", "transformers", "wandb", "matplotlib")

Graph = dict[str, set[str]]


def unit_of(module: str) -> str:
    """`pipelinerl.actor.loop` → `actor`."""
    return module.split(".")[1]


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by name; a folder's `__init__` has the folder's name."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return dict(zip(names, paths, strict=True))


@cache
def imports() -> Graph:
    """The modules of the package that each one imports: at the top, inside a function, or for type checking only."""
    return {name: imported(path) - {name} for name, path in modules().items() if name != "pipelinerl"}


def imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules() else str(node.module))
    return found & modules().keys() - {"pipelinerl"}


def units() -> Graph:
    """The import graph of folders, without `__main__` modules."""
    graph: Graph = {}
    for name, others in imports().items():
        if not name.endswith(".__main__"):
            graph.setdefault(unit_of(name), set()).update({unit_of(other) for other in others} - {unit_of(name)})
    return graph


def circles(graph: Graph) -> list[set[str]]:
    """Sets of nodes that reach each other."""
    reached = {node: reachable(graph, node) for node in graph}
    found = [{other for other in reached[node] if node in reached.get(other, ())} for node in graph]
    return [circle for i, circle in enumerate(found) if circle and circle not in found[:i]]


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


def layer_of(unit: str) -> int:
    for index, layer in enumerate(LAYERS):
        if unit in layer:
            return index
    pytest.fail(f"pipelinerl/{unit} has no place in the import rule: add it to LAYERS")


def test_imports_point_to_the_same_layer_or_below() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        if not name.endswith(".__main__")
        for other in others
        if layer_of(unit_of(other)) > layer_of(unit_of(name))
    ]
    assert wrong == []


def test_imports_between_folders_have_no_circle() -> None:
    assert circles(units()) == []


def test_imports_between_modules_have_no_circle() -> None:
    assert circles(imports()) == []


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d", "a"}, "e": set()}
    assert circles(graph) == [{"b", "c"}, {"d"}]


def test_imports_between_roles_do_not_exist() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if unit_of(name) in ROLES and unit_of(other) in ROLES and unit_of(other) != unit_of(name)
    ]
    assert wrong == []


@cache
def names_of(path: Path) -> set[str]:
    """Every name that a module binds anywhere, its folder's modules included."""
    found = {other.stem for other in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


def test_tests_and_benchmarks_import_what_exists() -> None:
    """Those that `make check` does not run, too: tests marked slow or gpu, and benchmarks."""
    wrong = []
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                ("pipelinerl", "benchmarks", "tests")
            ):
                continue
            place = ROOT / str(node.module).replace(".", "/")
            target = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            known = names_of(target) if target.exists() else {other.stem for other in place.glob("*.py")}
            wrong += [
                f"{path.relative_to(ROOT)}:{node.lineno}: {node.module} has no {alias.name}"
                for alias in node.names
                if alias.name not in known
            ]
    assert wrong == []


def test_imports_of_light_modules_load_nothing_heavy() -> None:
    code = (
        "import sys, importlib\n"
        f"for name in {LIGHT!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not heavy, f'{name} loads {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
