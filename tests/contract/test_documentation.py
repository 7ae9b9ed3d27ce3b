"""The documentation: the site builds without a warning, the guides' code runs, the README stays short."""

import ast
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipelinerl.__main__ import COMMANDS
from pipelinerl.config.backends import STREAM_BACKENDS
from pipelinerl.config.engine import EngineTraits, traits_of
from pipelinerl.config.keys import declared
from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.engines import build_engine
from pipelinerl.finetune.model import Policy
from pipelinerl.launcher import checks
from pipelinerl.plan.training_memory import engine_memory
from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader, open_writer
from pipelinerl.streams.api import backend_class, get_streams_backend
from pipelinerl.weights.transfer.wire import Connection
from tests.models import make_qwen2
from tests.says import says

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture
def guides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The modules of the guides, importable."""
    modules = [module for page in (DOCS / "guides").glob("*.md") for module in BLOCK.findall(page.read_text())]
    for name, code in modules:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, _ in modules:
        sys.modules.pop(name, None)


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "generate_rollout" in (tmp_path / "domains" / "index.html").read_text()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)|src=\"([^\"]+)\"", (ROOT / "README.md").read_text())
    assert [link for pair in links for link in pair if link and not (ROOT / link).exists()] == []


def test_guides_stream_backend_carries_records(guides: Path, tmp_path: Path) -> None:
    overrides = ["output_dir=run", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    chosen = ["streams.backend=folder_streams.FolderBackend", f"+streams.options.folder={tmp_path / 'records'}"]
    backend_from_config(parse(compose("base", [*overrides, *chosen])), tmp_path)
    spec = SingleStreamSpec(tmp_path, "notes")
    with open_reader(spec, str, name="trainer") as reader:
        assert reader.poll(0) == []
        with open_writer(spec, str) as writer:
            assert [writer.write(text) for text in ("a", "b", "c")] == [0, 1, 2]
            with pytest.raises(Exception, match="one writer"):
                open_writer(spec, str)
        assert reader.poll(0) == [(0, "a"), (1, "b"), (2, "c")]
        reader.commit(2)
    with open_reader(spec, str, name="trainer") as reader, open_writer(spec, str) as writer:
        assert writer.last() == (2, "c")
        assert writer.write("d") == 3
        assert reader.read_all() == [(2, "c"), (3, "d")]
    assert get_streams_backend().specs(tmp_path) == [spec]
    assert get_streams_backend().stats(spec).positions == {"trainer": 2}
    get_streams_backend().delete(spec)
    assert get_streams_backend().stats(spec).next_offset == 0


@pytest.mark.parametrize(
    ("backend", "options", "told"),
    [
        ("FolderBackend", {"folder": "records"}, None),
        ("FolderBackend", {}, ["folder_streams.FolderBackend", "folder"]),
        ("Missing", {}, ["folder_streams.Missing"]),
        ("Failing", {}, ["streams.backend", "folder_streams.Failing", "OSError", "no route"]),
        ("Small", {}, ["streams.backend", "folder_streams.Small", "8000 bytes", "seq_length`=63", 8064]),
        ("Enough", {}, None),
    ],
)
def test_stream_backend_of_a_user_is_tried_before_the_start(
    guides: Path, monkeypatch: pytest.MonkeyPatch, backend: str, options: dict[str, str], told: list[str] | None
) -> None:
    import folder_streams

    def no_route(self: object) -> None:
        raise OSError("no route")

    classes = {
        "Failing": {"__init__": no_route},
        "Small": {"__init__": lambda self: None, "max_record_bytes": 8000},
        "Enough": {"__init__": lambda self: None, "max_record_bytes": 8064},
    }
    for name, attributes in classes.items():
        made = type(name, (folder_streams.FolderBackend,), attributes)
        monkeypatch.setattr(folder_streams, name, made, raising=False)
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "finetune.seq_length=63"]
    chosen = [f"streams.backend=folder_streams.{backend}", f"+streams.options={options}".replace("'", "")]
    start = SimpleNamespace(config=parse(compose("base", [*required, *chosen])), path=Path("x"))
    if told is None:
        checks.stream_backend(start)
        return
    with pytest.raises(ConfigError, match=says(*told)):
        checks.stream_backend(start)


def test_a_line_gives_a_stream_backend_its_short_name(guides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STREAM_BACKENDS, "folder", "folder_streams.FolderBackend")
    assert backend_class("folder").__name__ == "FolderBackend"


def test_guides_transport_moves_a_bucket(guides: Path) -> None:
    import zip_transport

    ends = [Connection(end, patience_s=5) for end in socket.socketpair()]
    bucket, received = torch.randint(0, 255, (5000,), dtype=torch.uint8), torch.zeros(5000, dtype=torch.uint8)
    bucket_transport = zip_transport.ZipTransport()
    bucket_transport.send_bucket(ends[0], bucket)
    bucket_transport.receive_bucket(ends[1], received)
    for end in ends:
        end.close()
    assert torch.equal(bucket, received)


def test_guides_sampler_weighs(guides: Path) -> None:
    import my_sampler

    pool = SimpleNamespace(success_N=np.array([0.95, 0.9, np.nan]))
    assert my_sampler.not_solved_yet(pool, rest=0.25).tolist() == [0.25, 1.0, 1.0]


def test_guides_engine_steps(guides: Path) -> None:
    import my_engine

    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    engine = my_engine.SingleEngine(Policy(make_qwen2(32, hidden=8)), cfg, torch.device("cpu"))
    before = {name: parameter.clone() for name, parameter in engine.named_full_parameters()}
    loss = sum((parameter**2).sum() for parameter in engine.policy.parameters())
    engine.backward(loss, last=True)
    norm = engine.step(learning_rate=0.1)
    assert norm == pytest.approx(2 * sum(float((p**2).sum()) for p in before.values()) ** 0.5, rel=1e-5)
    assert all(not torch.equal(p, before[name]) for name, p in engine.named_full_parameters() if before[name].any())
    assert engine.pieces().keys() == {
        f"{n}.{key}" for n in engine.trained for key in ("param", "exp_avg", "exp_avg_sq")
    }


def unexplained(tree: ast.Module) -> list[tuple[str, list[str]]]:
    """(function, arguments) of public functions and methods with three or more arguments whose docstring omits some."""
    found = []
    for node in tree.body:
        scope = [(node, "")] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            of_class = ast.get_docstring(node) or ""
            scope = [(item, of_class) for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function, of_class in scope:
            arguments = [
                a.arg for a in (*function.args.args, *function.args.kwonlyargs) if a.arg not in ("self", "cls")
            ]
            text = (ast.get_docstring(function) or "") + of_class
            missing = [name for name in arguments if name not in text]
            if len(arguments) >= 3 and missing and not function.name.startswith("_"):
                found.append((function.name, missing))
    return found


def test_arguments_of_public_functions_are_explained() -> None:
    """In the modules of the reference. An implementation of a documented method need not repeat it."""
    modules = re.findall(r"^::: ([\w.]+)$", "\n".join(p.read_text() for p in (DOCS / "reference").glob("*.md")), re.M)
    assert len(modules) > 10
    wrong = []
    for module in modules:
        path = ROOT / (module.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        wrong += [(module, *one) for one in unexplained(ast.parse(path.read_text()))]
    assert [one for one in wrong if one[1] != "generate"] == []


NAMES = ("faq", "installing", "run-folder", "domains", "objectives", "testing", "migrating", "verification")
GUIDES = sorted((DOCS / "guides").glob("*.md"))
RECIPES = sorted((ROOT / "examples").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *(DOCS / f"{name}.md" for name in NAMES), *GUIDES, *RECIPES]
"""Pages whose commands are for one machine. Those of docs/cluster.md need several."""
OWN_FILES = ("my_domain", "sums", "sums_cpu", "NAME")
"""Configurations that a page has the reader write."""


def commands(page: Path, start: str) -> list[list[str]]:
    """The words of each command of a page's bash blocks that begins with ``start``."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [line.partition(" #")[0] for line in lines if start in line.partition(" #")[0]]
    return [words_of(line[line.index(start) :]) for line in found]


def words_of(line: str) -> list[str]:
    """The words as a shell would part them. A line with one quote only is part of a longer command."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def test_every_extra_is_in_the_table_of_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (_, table) = (DOCS / "installing.md").read_text().split("## Extras")
    named = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)}
    assert named == set(extras)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_pages_exist(page: Path) -> None:
    names = [words[1] for words in commands(page, "pipelinerl ") if words[0] == "pipelinerl"]
    assert [name for name in names if name not in COMMANDS and not name.startswith("-")] == []
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [word for words in commands(page, "make ") for word in words[1:] if "=" not in word and word.isidentifier()]
    assert [name for name in named if name not in targets] == []


def test_commands_keys_and_names_of_the_questions_exist() -> None:
    """A name with a dot or a value is a key. Any other word in code also stands in code on another page."""
    page = DOCS / "faq.md"
    others = " ".join(code for path in DOCS.rglob("*.md") if path != page for code in spans(path))
    keys = {key.name for key in declared(Config)}
    wrong = []
    for code in spans(page):
        if code.startswith("pipelinerl "):
            wrong += [code] if code.split()[1] not in COMMANDS else []
            continue
        for word in code.split():
            name = word.partition("=")[0]
            is_key = re.fullmatch(r"[a-z][\w.-]+=.+|[a-z_]+(\.[a-z_-]+)+:?", word)
            if is_key and not name.endswith((".jsonl", ".score")):
                above = name.rstrip(":").rpartition(".")[0]
                wrong += [] if {name.rstrip(":"), above} & keys else [word]
            elif not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", others):
                wrong.append(word)
    assert wrong == []


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))


def test_files_and_modules_of_the_page_for_agents_exist() -> None:
    text = (ROOT / "AGENTS.md").read_text()
    named = re.findall(r"`([a-z_]+/[\w/.-]*|[\w.-]+\.(?:md|toml))`|\]\((.+?)\)|pytest -q (\S+)", text)
    paths = {path for groups in named for path in groups if path and "NAME" not in path and "/x/" not in path}
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    modules = set(re.findall(r"python -m (\w[\w.]*)", text)) | set(re.findall(r"`(pipelinerl(?:\.\w+)+)`", text))
    assert len(modules) > 2
    assert [name for name in sorted(modules) if not is_defined(name)] == []


def is_defined(name: str) -> bool:
    """Whether a dotted name is a module, or a name in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_launches_of_the_pages_are_valid_configurations(page: Path) -> None:
    for words in commands(page, "pipelinerl.launch "):
        name = next((word.partition("=")[2] for word in words if word.startswith("--config-name=")), "NAME")
        plain = [word for word in words[1:] if not word.startswith("--") and "=" in word and "…" not in word]
        if name not in OWN_FILES and not any("/" in word.partition("=")[0] for word in plain):
            parse(compose(name, ["output_dir=x", *plain]))


def test_guides_engine_is_chosen_planned_and_built_by_its_dotted_name(guides: Path) -> None:
    """Its plan: 4 bytes of weights, 4 of gradient and 8 of moments per parameter, or half the moments."""
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, "finetune.engine=my_engine.SingleEngine"]))
    assert str(engine_memory(cfg, 1)) == "my_engine.SingleEngine"
    assert engine_memory(cfg, 1).state_bytes(100) == (400, 400, 800)
    cfg = parse(compose("base", [*required, "finetune.engine=half_engine.HalfEngine"]))
    assert engine_memory(cfg, 1).state_bytes(100) == (400, 400, 400)
    engine = build_engine("half_engine.HalfEngine", Policy(make_qwen2(32, hidden=8)), cfg, torch.device("cpu"))
    assert type(engine).__name__ == "HalfEngine"


def test_engine_of_a_user_says_what_it_cannot_run_with(guides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import my_engine

    def check(cfg: Config) -> str | None:
        return "`finetune.compile` is true: SingleEngine does not compile" if cfg.finetune.compile else None

    monkeypatch.setattr(my_engine.SingleEngine, "traits", EngineTraits(check=check))
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    overrides = [*required, "finetune.engine=my_engine.SingleEngine"]
    plain, compiled = (parse(compose("base", [*overrides, f"finetune.compile={value}"])) for value in ("false", "true"))
    world = SimpleNamespace(trainer_world_size=1)
    checks.engine(SimpleNamespace(config=plain, world=world))
    with pytest.raises(ConfigError, match="does not compile"):
        checks.engine(SimpleNamespace(config=compiled, world=world))


def test_engine_made_for_one_rank_is_refused_on_two_before_the_start(guides: Path) -> None:
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, "finetune.engine=my_engine.SingleEngine"]))
    checks.engine(SimpleNamespace(config=cfg, world=SimpleNamespace(trainer_world_size=1)))
    with pytest.raises(
        ConfigError,
        match=says("finetune.engine", "my_engine.SingleEngine", "at most 1", "has 2", "world.finetune_fraction"),
    ):
        checks.engine(SimpleNamespace(config=cfg, world=SimpleNamespace(trainer_world_size=2)))


def test_engine_made_for_one_rank_is_refused_in_a_group_of_two(guides: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its traits say: its gradients would be those of one rank."""
    for name, answer in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda answer=answer: answer)
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    policy = Policy(make_qwen2(32, hidden=8))
    with pytest.raises(ConfigError, match=says("my_engine.SingleEngine", "rank 0 of 1", "rank 1 of 2", "max_ranks")):
        build_engine("my_engine.SingleEngine", policy, cfg, torch.device("cpu"))
    assert build_engine("ddp", policy, cfg, torch.device("cpu")).world_size == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_engine.Missing", "`finetune.engine`: .* has no 'Missing'"),
        ("nowhere.Engine", "`finetune.engine`: .* no module 'nowhere'"),
        ("collections.OrderedDict", "collections.OrderedDict, which is no engine: derive the class from"),
    ],
)
def test_name_of_no_engine_is_refused(guides: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        traits_of(name)
