"""Every block of docs/cluster.md is executed, or its commands are read by the programs that they name.

Blocks of SLURM, JobSet pods and Ray nodes have slow tests of their own. Nothing here can read those of
kubectl and docker.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose, parse
from pipelinerl.inspect import exporter, status
from pipelinerl.launcher import preflight
from pipelinerl.launcher.command_line import main as launch
from pipelinerl.launcher.render.command import main as render
from pipelinerl.membership.address import parse_address
from pipelinerl.membership.joining import read_span
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.role import role_parser
from pipelinerl.membership.stores import FolderStore
from pipelinerl.world import Cluster, Node, map_world

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line.partition(" > ")[0].partition("  #")[0], comments=True)
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("python -m pipelinerl.")
]


FIRST_DAY = re.findall(r"^\| \d.*", PAGE.partition("## One machine")[0], re.MULTILINE)
"""Rows of the table that says what the first commands print."""


def commands(module: str) -> list[list[str]]:
    return [command[3:] for command in COMMANDS if command[2] == f"pipelinerl.{module}"]


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_are_shell(block: str) -> None:
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("arguments", commands("render"))
def test_rendered_documents_can_be_rendered(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert render(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", commands("render"))
def test_experiments_of_rendered_documents_can_be_placed_on_their_nodes(arguments: list[str]) -> None:
    name, *overrides = arguments[arguments.index("--") + 1 :]
    cfg = parse(compose(name.removeprefix("--config-name="), overrides))
    nodes = tuple(Node(rank=rank, hostname=f"host{rank}", devices=8) for rank in range(2))
    world = map_world(cfg, Cluster(accelerator="cuda", nodes=nodes, identity="x"), check=False)
    assert world.get("actor_llm")
    assert len(world.get("actor_llm_part")) == len(world.get("actor_llm")) * (cfg.world.nodes_per_server - 1)


def test_block_for_ssh_starts_a_launcher_on_every_machine(tmp_path: Path) -> None:
    """A program in ssh's place runs the command here. One in Python's place writes down what it was given."""
    (block,) = [block for block in BLOCKS if "ssh " in block]
    programs = {
        "ssh": 'shift; exec bash -c "$*"',
        ".venv/bin/python": f'echo "$RANK/$WORLD_SIZE" "$@" >> {tmp_path}/log',
    }
    programs[".venv/bin/python"] += f'; echo "$PIPELINERL_HOSTS ${{#PIPELINERL_SECRET}}" >> {tmp_path}/hosts'
    for name, script in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-euc", block.replace("/opt/pipelinerl", str(tmp_path))], env=env, check=True, timeout=60)
    started = " -m pipelinerl.launch --config-name=base_2node output_dir=results/two_nodes"
    assert sorted((tmp_path / "log").read_text().splitlines()) == [f"{rank}/2{started}" for rank in (0, 1)]
    assert (tmp_path / "hosts").read_text().splitlines() == ["10.0.0.1,10.0.0.2 64"] * 2


@pytest.mark.parametrize("arguments", commands("plan"))
def test_plans_are_made(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pipelinerl.plan", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", commands("status"))
def test_members_of_a_run_are_listed_and_asked(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status, "is_running", lambda _: True)
    run_dir = tmp_path / arguments[0]
    (run_dir / "conf").mkdir(parents=True)
    OmegaConf.save(compose("quickstart", [f"output_dir={run_dir}"]), run_dir / "conf" / "config.yaml", resolve=True)
    store = FolderStore(run_dir)
    store.overwrite(Lease(name="actor_llm_1", incarnation="a", ttl_s=9))
    assert status.main(arguments) == 0
    assert "actor_llm_1" in capsys.readouterr().out
    assert store.is_asked_to_leave("actor_llm_1") == ("--leave" in arguments)


@pytest.mark.parametrize("line", [line for block in BLOCKS for line in block.splitlines() if line[:10] == "ray start "])
def test_ray_takes_its_command_line(line: str) -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    scripts.start.make_context("start", shlex.split(line, comments=True)[2:])


@pytest.mark.parametrize("arguments", commands("inference"))
def test_servers_that_join_take_their_command_line(arguments: list[str]) -> None:
    args = role_parser().parse_args(arguments)
    parse_address(args.run)
    read_span(args.nodes, args.node, args.meet)


@pytest.mark.parametrize("arguments", [args for args in commands("inspect.exporter") if "--port" not in args])
def test_exporter_prints_its_documents(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exporter.main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", commands("launch"))
def test_launches_pass_a_dry_run(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "check_domain", lambda container: [])  # each domain's own tests run it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # without a network, a question to it would wait for its time-out
    monkeypatch.setenv("COLUMNS", "250")
    code = launch([*arguments, "dry_run=true", f"output_dir={tmp_path / 'run'}"])
    printed, place = capsys.readouterr().out, commands("launch").index(arguments)
    assert (code, "nothing was started" in printed, len(FIRST_DAY)) == (0, True, 5)
    for figure in FIRST_DAY[place].strip("| ").split(" | ")[2:] if place < len(FIRST_DAY) else ():
        assert f" {figure} " in printed


def test_every_command_of_the_page_is_known() -> None:
    assert {command[2] for command in COMMANDS} == {
        *("pipelinerl.launch", "pipelinerl.plan", "pipelinerl.render", "pipelinerl.inference"),
        *("pipelinerl.status", "pipelinerl.inspect.exporter"),
    }
