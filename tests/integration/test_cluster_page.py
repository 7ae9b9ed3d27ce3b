"""Every command of docs/cluster.md is one that the programs take."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.inspect import exporter, members
from pipelinerl.membership.address import parse_address
from pipelinerl.observability.role import role_parser
from pipelinerl.render.__main__ import main as render

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line.partition(" > ")[0].partition("  #")[0], comments=True)
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("python -m pipelinerl.")
]


def commands(module: str) -> list[list[str]]:
    return [command[3:] for command in COMMANDS if command[2] == f"pipelinerl.{module}"]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_are_shell(block: str) -> None:
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("arguments", commands("render"))
def test_rendered_documents_can_be_rendered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert render(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", commands("inference"))
def test_servers_that_join_take_their_command_line(arguments: list[str]) -> None:
    args = role_parser().parse_args(arguments)
    parse_address(args.run)


@pytest.mark.parametrize("arguments", [args for args in commands("inspect.exporter") if "--port" not in args])
def test_exporter_prints_its_documents(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exporter.main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", commands("launch"))
def test_launches_pass_a_dry_run(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelinerl.launch", *arguments, "dry_run=true", f"output_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_command_of_the_page_is_known() -> None:
    assert {command[2] for command in COMMANDS} == {
        *("pipelinerl.launch", "pipelinerl.plan", "pipelinerl.render", "pipelinerl.inference"),
        *("pipelinerl.inspect.members", "pipelinerl.inspect.exporter"),
    }
    assert members.main
