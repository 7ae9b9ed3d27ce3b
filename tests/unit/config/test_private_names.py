"""Names that other libraries may rename: the installed ones have all, the table has all that are used."""

import ast
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.config import private_names
from pipelinerl.config.private_names import PRIVATE_NAMES, Part, require_private_names
from pipelinerl.config.versions import installed_version
from pipelinerl.errors import ConfigError
from tests.says import says

SAID_ELSEWHERE = {
    *("_exit", "_run_exitfuncs", "_shutdown", "_current_frames"),  # Python's own
    *("_C", "_accelerator_setAllocatorSettings"),  # torch 2.11 has none, which is handled
    *("_hp_mapping", "_z3_optimizer", "_schema"),  # of instances alone: the first read fails
}


@pytest.mark.parametrize("part", ["trainer", "deepspeed"])
def test_installed_libraries_have_every_private_name(part: Part) -> None:
    """Every test that starts a vLLM server asks for those of the other parts."""
    require_private_names(part)


@pytest.mark.parametrize("gone", ["torch:_renamed", "torch.nn:Module._renamed", "torch.renamed:name"])
def test_renamed_name_is_an_error_that_names_it_and_the_version(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private_names.PRIVATE_NAMES, "worker", (gone,))
    version = installed_version("torch")
    with pytest.raises(ConfigError, match=says("torch", version, gone.replace(":", "."), "worker", "2.13")):
        require_private_names("worker")


def test_table_has_every_private_name_of_another_library_that_is_used() -> None:
    used, own = set[str](), set[str]()
    for path in Path(pipelinerl.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name):
                    used.add(name)
                case (
                    ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store())
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    own.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Assign(targets=targets):
                    own |= {target.id for target in targets if isinstance(target, ast.Name)}
    for path in Path(pipelinerl.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr not in own}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")} - SAID_ELSEWHERE
    known = {place.rpartition(".")[2].rpartition(":")[2] for places in PRIVATE_NAMES.values() for place in places}
    assert private - known == set()
    assert len(private) > 12
