"""Limits of size, and one meaning per name. What exceeds a limit says why beside it, in a comment `# structure: …`."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pipelinerl"

MAX_FUNCTION_LINES = 50
MAX_CLASS_ATTRIBUTES = 12
MAX_CLASS_METHODS = 20
MAX_MODULE_LINES = 400
REASON = "# structure: "

PUBLIC = {"llm", "async_llm", "rollouts", "testing", "errors", "state", "utils", "countdown_utils"}
"""Modules beside the folders that a user's domain imports. The last three are import paths of PipelineRL's domains."""
ENTRIES = {"launch", "__main__"}
"""Modules beside the folders that are run: what starts a run, and the command `pipelinerl`, which runs any program."""
NAMES_OF_COMMANDS = {"status", "ledger"}
"""Modules beside the folders that give a command of `inspect` its name for `python -m`. They define nothing."""

FOREIGN_PRIVATE = {
    "_attn_implementation": "transformers: the attention that a configuration resolved to",
    "_z3_optimizer": "DeepSpeed: access to this rank's shard at ZeRO stage 3",
    "_hp_mapping": "DeepSpeed: where a parameter lies in the flat master weights",
    "_lazy_init_hp_params_optimizer_state": "DeepSpeed: links optimizer state that was made before the first step",
    "_partition_all_parameters": "DeepSpeed: refreshes the working copy after a load",
    "_reassign_or_swap_out_partitioned_parameters": "DeepSpeed: likewise, at stage 3",
    "_parameters": "torch.nn.Module: sets a parameter without registering it again",
    "_new_shared_cuda": "torch.UntypedStorage: maps the memory of a CUDA IPC handle",
    "_share_cuda_": "torch.UntypedStorage: makes a CUDA IPC handle",
    "_cdata": "torch.UntypedStorage: identity of a storage without memory",
    "_registry": "vLLM's WeightTransferEngineFactory: refuses a second registration",
    "_run_exitfuncs": "atexit: runs the handlers before `os._exit`",
    "_shutdown": "threading: joins threads as the interpreter does at its end",
    "_resize_cache": "tokenizers: switches off the cache of words",
}
"""Private attributes of other projects that the package uses, with what for. There is no public way to the same."""

WRITTEN_ELSEWHERE = {
    "reward": "public: a domain rewards its training texts",
    "domain": "public: the dispatcher names the domain of a result",
    "argv": "sys",
    "path": "sys",
    "value": "multiprocessing.Value",
    "outputs": "vLLM's report of a step",
    "head_dim": "a configuration of transformers",
    "model_path": "a DictConfig",
    "scale": "torch.autograd's context of a function",
    "base": "weights.snapshot.Snapshot, a record that its origin fills in beside training",
    "descriptions": "weights.offer.Offer, a record that the sender fills in",
    "held": "weights.member.Member, a record that roster and sender share",
    "is_suspect": "likewise",
    "is_up": "likewise",
    "update": "likewise",
    "watch": "likewise",
    "workers": "likewise",
}
"""Public attributes that a module writes on objects of others, with why. What is not the package's own has an owner
elsewhere, and its name is by chance that of an attribute of ours."""

CALLED_FROM_OUTSIDE = {
    "init_transfer_engine": "vLLM's workers, by name",
    "receive_weights": "vLLM's workers, by name",
    "start_weight_update": "vLLM's workers, by name",
    "lookup_object": "torch's planner of checkpoints",
    "lookup_tensor": "torch's planner of checkpoints",
    "manipulate_search_path": "Hydra's plugins",
    "capture_signals": "uvicorn's server",
    "do_GET": "http.server",
    "log_message": "http.server",
    "register_domain_rollout": "PipelineRL's name, for users",
    "get_reward_range": "PipelineRL's name, for users",
    "get_preprocessor_urls": "PipelineRL's name, for users",
    "get_all_jobs": "PipelineRL's name, for users",
    "total_finetune_gpus": "PipelineRL's name, for users",
    "spec_of": "tests and benchmarks of weights, whose parameters are tensors without a checkpoint",
}
"""Functions that nothing in the package calls, with who does. Modules in `PUBLIC` are for users anyway."""
REGISTERS = ("app.", "router.", "model_validator", "field_validator", "model_serializer", "field_serializer")
"""Beginnings of decorators that hand a function to somebody who calls it."""

BEING_MENDED = {"tests/integration/test_weight_transfer.py"}
"""What is over a limit today. An entry that is over no limit any more must go: the list only shrinks."""

OF_ONE_ROLE = {
    "main": "of a module that is run",
    "run": "the main function of a role",
    "serve": "answers requests until it is told to end",
    "parser": "the arguments of a command",
    "add_arguments": "the arguments of a command of `plan`",
    "as_json": "what a command prints with --json",
    "render": "the documents of a platform",
    "generate_rollout": "the interface of a domain",
    "load_problems": "the interface of a domain",
    "judge": "the verdict of a domain about an answer",
    "instructions": "what a domain tells the model",
    "question": "what a domain asks the model",
    "problem_of": "from a row of a data set to a problem",
    "named_rows": "the rows of the data sets that a domain names",
    "warm_up": "what workers need before they are forked",
}
"""Public functions that are the same in several modules by convention, with the one meaning that each has."""


@cache
def sources() -> dict[str, str]:
    """Text of every module by its path within the package."""
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in sources().items()}


def attributes(node: ast.ClassDef) -> set[str]:
    """Fields declared in the class, and attributes that its methods assign to `self`."""
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    assigned = {
        item.attr
        for method in methods(node)
        for item in ast.walk(method)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if isinstance(item.value, ast.Name) and item.value.id == "self"
    }
    return fields | assigned


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def excesses(name: str, text: str) -> Iterator[tuple[str, str]]:
    """(place, what is over the limit there) for one module, but for what gives its reason."""
    lines = text.splitlines()
    if len(lines) > MAX_MODULE_LINES and not has_reason(lines, 1):
        yield name, f"{len(lines)} lines, the limit is {MAX_MODULE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and not has_reason(lines, node.lineno):
                yield f"{name}: {node.name}", f"{length} lines, the limit is {MAX_FUNCTION_LINES}"
        elif isinstance(node, ast.ClassDef) and not has_reason(lines, node.lineno):
            if len(attributes(node)) > MAX_CLASS_ATTRIBUTES:
                yield f"{name}: {node.name}", f"{len(attributes(node))} attributes, the limit is {MAX_CLASS_ATTRIBUTES}"
            if len(methods(node)) > MAX_CLASS_METHODS:
                yield f"{name}: {node.name}", f"{len(methods(node))} methods, the limit is {MAX_CLASS_METHODS}"


def has_reason(lines: list[str], line: int) -> bool:
    """Whether a definition has its reason at the end of its line or on the next one."""
    return any(REASON in text for text in lines[line - 1 : line + 1])


def names_with_one_meaning(tree: ast.Module) -> Iterator[str]:
    """Classes, type aliases and public functions that a module defines at its top."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) or (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_")
        ):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (
                t.id for t in node.targets if isinstance(t, ast.Name) and t.id[0].isupper() and not t.id.isupper()
            )


def test_nothing_is_over_its_limit() -> None:
    beside = [path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = sources() | {str(path.relative_to(ROOT)): path.read_text() for path in beside}
    found = [(place, excess) for name, text in texts.items() for place, excess in excesses(name, text)]
    assert [f"{place}: {excess}" for place, excess in found if place not in BEING_MENDED] == []
    assert sorted(BEING_MENDED - {place for place, _ in found}) == [], "mended: remove it from BEING_MENDED"


def test_a_name_has_one_meaning() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees().items():
        for name in names_with_one_meaning(tree):
            places[name].add(module)
    twice = {name: sorted(found) for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in OF_ONE_ROLE} == {}
    assert sorted(OF_ONE_ROLE.keys() - twice.keys()) == [], "defined once: remove it from OF_ONE_ROLE"


def test_a_module_beside_the_folders_is_public_or_an_entry() -> None:
    loose = {name.removesuffix(".py") for name in sources() if "/" not in name} - {"__init__"}
    assert loose == PUBLIC | ENTRIES | NAMES_OF_COMMANDS
    defined = {name for name in NAMES_OF_COMMANDS for node in trees()[f"{name}.py"].body if hasattr(node, "name")}
    assert defined == set()


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every private attribute of an object that is not `self`, a class itself, or its `super()`."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | {"self", "cls"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value
            is_own = isinstance(owner, ast.Name) and owner.id in classes
            is_super = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
            if is_private(node.attr) and not is_own and not is_super:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(str(name)):
                yield node.lineno, str(name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipelinerl"):
            yield from ((node.lineno, alias.name) for alias in node.names if is_private(alias.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_exit"


def test_no_object_reads_the_private_attributes_of_another() -> None:
    found = [(name, line, attribute) for name, tree in trees().items() for line, attribute in private_uses(tree)]
    assert [f"{name}:{line} {used}" for name, line, used in found if used not in FOREIGN_PRIVATE] == []
    assert sorted(FOREIGN_PRIVATE.keys() - {used for _, _, used in found}) == [], "not used any more"


@cache
def owners() -> dict[str, set[str]]:
    """The modules whose classes have an attribute of this name."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            for name in attributes(node) if isinstance(node, ast.ClassDef) else ():
                found[name].add(module)
    return found


def writes(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of every attribute that is written on an object that is not `self` or `cls`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store | ast.Del):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.lineno, node.attr


def test_no_module_writes_the_attributes_of_another_modules_objects() -> None:
    found = [
        (module, line, name)
        for module, tree in trees().items()
        for line, name in writes(tree)
        if owners().get(name) and module not in owners()[name]
    ]
    assert [f"{module}:{line} {name}" for module, line, name in found if name not in WRITTEN_ELSEWHERE] == []
    assert sorted(WRITTEN_ELSEWHERE.keys() - {name for _, _, name in found}) == [], "not written any more"


def test_writes_are_seen() -> None:
    text = "def f(self, other):\n    self.a = other.b = 1\n    other.c.d += 1\n    del other.e\n    return other.g"
    assert sorted(name for _, name in writes(ast.parse(text))) == ["b", "d", "e"]


def test_private_uses_are_seen() -> None:
    text = """
class Own:
    def f(self, other): self._a = Own._b = other._c; super()._d()
    def g(self): getattr(self.h, "_e"); self.h._f
from pipelinerl.llm import _h
"""
    assert sorted(name for _, name in private_uses(ast.parse(text))) == ["_c", "_e", "_f", "_h"]


def unused_functions(texts: dict[str, str]) -> set[str]:
    """Names of functions and classes that the modules mention nowhere but where they define them."""
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    defined = Counter(
        node.name
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.endswith("__")
        if not any(ast.unparse(decorator).startswith(REGISTERS) for decorator in node.decorator_list)
    )
    return {name for name, count in defined.items() if words[name] <= count}


def test_every_function_is_called() -> None:
    settings = {str(path): repr(path.read_text()) for path in (PACKAGE / "conf").rglob("*.yaml")}
    public = {
        node.name
        for name in PUBLIC
        for node in ast.walk(trees()[f"{name}.py"])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    unused = unused_functions(sources() | settings)
    assert sorted(unused - public - CALLED_FROM_OUTSIDE.keys()) == []
    assert sorted(CALLED_FROM_OUTSIDE.keys() - unused) == [], "used in the package: remove it"


def test_unused_functions_are_seen() -> None:
    text = "def a(): b()\ndef b(): ...\nclass C:\n    def d(self): ...\n    @app.get('/')\n    def e(self): ...\nC()"
    assert unused_functions({"m.py": text}) == {"a", "d"}


def test_limits_are_seen() -> None:
    body = "\n".join(f"        self.a{i} = {i}" for i in range(60))
    text = f"class Wide:\n    def __init__(self):\n{body}\n"
    assert [place for place, _ in excesses("m.py", text)] == ["m.py: Wide", "m.py: __init__"]
    reasoned = text.replace("class Wide:", "class Wide:  # structure: a test").replace(
        "(self):", "(self):  # structure: b"
    )
    assert list(excesses("m.py", reasoned)) == []
    assert [place for place, _ in excesses("m.py", "x = 1\n" * 401)] == ["m.py"]


def unexplained_excepts(text: str) -> list[int]:
    """Lines of handlers that take every exception, neither raise it again nor say at the line's end why."""
    lines = text.splitlines()
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or (isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")))
        and not (isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None)
        and "  # " not in lines[node.lineno - 1]
    ]


def test_a_handler_that_takes_everything_raises_it_again_or_says_why() -> None:
    assert [f"{name}:{line}" for name, text in sources().items() for line in unexplained_excepts(text)] == []
    assert unexplained_excepts("try:\n    f()\nexcept Exception:\n    pass\n") == [3]


def free_log_lines(tree: ast.Module) -> list[int]:
    """Lines of calls of the module's `log` whose message is a literal that does not begin with `event=name`."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
        if isinstance(node.args[0], ast.Constant) and node.args[0].value != "%s"
        if not re.match(r"event=\w+( |$)", str(node.args[0].value))
    ]


def test_a_log_line_begins_with_its_event() -> None:
    assert [f"{name}:{line}" for name, tree in trees().items() for line in free_log_lines(tree)] == []
    assert free_log_lines(ast.parse('log.info("a b=%d", 1)\nlog.info("event=a b=%d", 1)')) == [1]
