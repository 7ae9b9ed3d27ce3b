"""The import rule: who may import whom, and who may load torch, vllm or deepspeed."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "pipelinerl"

LAYERS = (
    ("errors", "variables", "records", "config", "rollouts", "tool_calls"),
    ("streams", "world", "llm", "chat", "async_llm", "state", "observability", "ledger", "status", "agents", "testing"),
    ("weights",),
    ("domains", "verifier", "sandbox", "tiny_model", "plan", "utils"),
    ("actor", "preprocess", "finetune", "inference"),
    ("launcher",),
    ("launch",),
)
"""A module may import from its own layer and those above it in this list. Domains and verifier know each other: one
asks, the other runs its judges."""
ROLES = ("actor", "preprocess", "finetune", "inference", "verifier")
LIGHT = (
    "pipelinerl.launch",
    "pipelinerl.launcher.program",
    "pipelinerl.launcher.domain_check",
    "pipelinerl.status",
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


def unit_of(module: str) -> str | None:
    """`pipelinerl.actor.loop` → `actor`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "pipelinerl" and len(parts) > 1 else None


@cache
def imports() -> dict[Path, set[str]]:
    """Every unit that a file imports, lazily or not; imports for type checking only do not count."""
    found: dict[Path, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        found[path] = {unit for name in names if (unit := unit_of(name))}
    return found


def layer_of(unit: str) -> int:
    for index, layer in enumerate(LAYERS):
        if unit in layer:
            return index
    pytest.fail(f"pipelinerl/{unit} has no place in the import rule: add it to LAYERS")


def unit_of_path(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def test_imports_point_to_the_same_layer_or_below() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {unit}"
        for path, units in imports().items()
        if unit_of_path(path) != "__init__"
        for unit in units
        if not unit.startswith("_") and layer_of(unit) > layer_of(unit_of_path(path))
    ]
    assert wrong == []


def test_imports_between_roles_do_not_exist() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {unit}"
        for path, units in imports().items()
        for unit in units
        if unit_of_path(path) in ROLES and unit in ROLES and unit != unit_of_path(path)
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
