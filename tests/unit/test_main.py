"""The command `pipelinerl` itself."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.errors import EXIT_REFUSED, told_in_one_line

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A container without a locale, for Pythons that would mend it themselves."""
ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "AGENTS.md")
COMMAND = re.compile(r"^(?:python -m )?pipelinerl (\S+)(.*?)(?: #|$)", re.MULTILINE)
OPTION = re.compile(r"--[a-z][a-z-]+")
PRINT_TABLES = ("check", "evaluate", "replay", "rollouts", "why")


def test_help_whose_reader_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_output_without_room_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-m", "pipelinerl", "--help"], stdout=full, stderr=-1, check=False)
    assert (done.returncode, done.stderr) == (2, b"error: the output cannot be written: No space left on device\n")


def test_folder_in_place_of_a_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told_in_one_line(lambda: len(tmp_path.read_text())) == EXIT_REFUSED
    assert capsys.readouterr().err == f"error: {tmp_path}: Is a directory\n"


def test_help_of_every_command_needs_no_docstrings_locale_or_torch_and_has_the_options_of_the_pages() -> None:
    code = (
        "import sys; from pipelinerl.__main__ import COMMANDS, main\n"
        "print([name for name in COMMANDS if main([name, '--help']) != 0], main(['--help']), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, env=os.environ | ASCII, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"[] 0 False\n")
    options = {one.split()[0]: set(OPTION.findall(one)) for one in done.stdout.decode().split("usage: pipelinerl ")[1:]}
    shown = [(name, set(OPTION.findall(rest))) for page in PAGES for name, rest in COMMAND.findall(page.read_text())]
    assert len(shown) > 5
    assert [(name, used - options[name]) for name, used in shown if name in options and used - options[name]] == []
    assert [name for name in PRINT_TABLES if "--json" not in options[name]] == []


def test_help_beside_a_file_that_is_no_text_is_printed(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_bytes("# mine\n".encode("utf-16"))
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl", "--help"], cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"  mine " in done.stdout


def test_program_in_a_locale_without_utf8_starts_again_in_utf8() -> None:
    code = (
        "import sys; from pipelinerl.config.environment import in_utf8; in_utf8(); "
        "print(sys.argv[1:], sys.flags.optimize, sys.stdout.encoding, open('/dev/null').encoding)"
    )
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, "数学 a"], capture_output=True, env=os.environ | ASCII, check=True
    )
    assert done.stdout.decode() == "['数学 a'] 1 utf-8 utf-8\n"


def test_example_of_a_checkout_is_found_and_imported_from_any_folder(tmp_path: Path) -> None:
    overrides = ["dry_run=true", f"output_dir={tmp_path / 'run'}", "tiny_model={recipe: largest, seed: 0, params: {}}"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl.launch", "--config-name=words", *overrides],
        cwd=tmp_path, env=variables | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pipelinerl.finetune" in done.stdout
