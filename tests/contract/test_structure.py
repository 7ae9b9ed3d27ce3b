"""What no linter checks: a class has its name for itself, log lines begin with their event, dead code is found,
the changelog can be read."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from tools.dead_code import dead

PACKAGE = Path(__file__).resolve().parents[2] / "pipelinerl"


@cache
def trees() -> dict[str, ast.Module]:
    """Every module by its path within the package."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def test_the_name_of_a_class_has_one_meaning() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module)
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


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


def without_encoding(tree: ast.Module) -> list[int]:
    """Lines of calls that read or write text in the encoding of the locale."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _has_no_encoding(node)]


def _has_no_encoding(call: ast.Call) -> bool:
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    if given.keys() & {"encoding", "fileobj", None} or name in ("read_text", "supervisor.read_text"):  # the jail's own
        return False
    if method in ("open", "fdopen"):
        modes = call.args if method == "open" and "." in name else call.args[1:]
        modes_are_text = all(isinstance(mode, ast.Constant) and "b" not in str(mode.value) for mode in modes)
        return modes_are_text and "b" not in given.get("mode", "")
    return method in ("read_text", "write_text") or "True" in (given.get("text"), given.get("universal_newlines"))


def test_text_is_read_and_written_in_utf8_whatever_the_locale() -> None:
    assert [f"{name}:{line}" for name, tree in trees().items() for line in without_encoding(tree)] == []
    wrong = "open(p)\np.read_text()\np.write_text(t)\nrun(c, text=True)\n(a / b).open('w')\nos.fdopen(1, 'w')\n"
    assert without_encoding(ast.parse(wrong)) == [1, 2, 3, 4, 5, 6]
    assert without_encoding(ast.parse("open(p, 'rb')\nopen(p, 'w', encoding='utf-8')\nImage.open(p)\n")) == []


def test_dead_code_is_what_neither_code_nor_string_nor_setting_names(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    (package / "engines").mkdir(parents=True)
    (package / "conf").mkdir()
    (package / "public.py").write_text("def for_users(): ...\n")
    (package / "conf" / "base.yaml").write_text("rollout: mine.engines.fast.from_setting\n")
    (package / "engines" / "fast.py").write_text(
        "class Fast: ...\nENGINES = {'fast': 'mine.engines.fast.Fast'}\ndef from_setting(): ...\n"
        "def called(): ...\ndef forgotten(): ...\n@app.get('/')\ndef route(): ...\ncalled()\n"
    )
    assert dead(package, {"ignore_decorators": ["@app.*"]}) == ["mine/engines/fast.py:5: unused function 'forgotten'"]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "task.py").write_text(
        "from mine.engines.fast import forgotten\nforgotten()\ndef own(): ...\n"
    )
    assert dead(package, {"ignore_decorators": ["@app.*"]}, tmp_path / "examples") == []


def test_the_changelog_has_one_short_line_for_each_change_in_one_of_four_sections() -> None:
    lines = (PACKAGE.parent / "CHANGELOG.md").read_text().partition("\n## ")[2].splitlines()
    sections = [line for line in lines if line.startswith("### ")]
    assert sections == ["### Added", "### Changed", "### Removed", "### Fixed"]
    changes = [line for line in lines[1:] if line and not line.startswith("#")]
    assert [line for line in changes if not line.startswith("- ") or len(line) > 160] == []
    assert [line for line, times in Counter(changes).items() if times > 1] == []
