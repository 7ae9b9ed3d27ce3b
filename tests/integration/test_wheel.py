"""A wheel in an empty environment, used from an empty folder: what a user without a checkout has."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPENDENCIES = Path(pytest.__file__).resolve().parents[1]
"""The packages of this environment. A `.pth` file lends them without what is installed as editable among them."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    source.mkdir()
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    options = ["--no-deps", "--no-build-isolation", "-q", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(place), str(source)], check=True)
    (built,) = place.glob("*.whl")
    return built


class Installed(NamedTuple):
    """An environment that has the wheel and, of the checkout, nothing."""

    command: Path
    """The command `pipelinerl`."""
    variables: dict[str, str]
    """With which it finds its package."""


@pytest.fixture(
    scope="module", params=["venv", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("target", "user"))]
)
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, or for one user, or in a folder that PYTHONPATH names."""
    place = tmp_path_factory.mktemp(request.param)
    venv.create(place / "env", symlinks=True, system_site_packages=request.param == "user")
    libraries = next((place / "env" / "lib").glob("python*")) / "site-packages"
    (libraries / "dependencies.pth").write_text(f"{DEPENDENCIES}\n")
    python, folder = place / "env" / "bin" / "python", place / request.param
    options, variables, command = {
        "venv": ([], {}, python.with_name("pipelinerl")),
        "target": (["--target", str(folder)], {"PYTHONPATH": str(folder)}, folder / "bin" / "pipelinerl"),
        "user": (["--user"], {"PYTHONUSERBASE": str(folder)}, folder / "bin" / "pipelinerl"),
    }[request.param]
    arguments = ["--python", str(python), "install", "-q", "--no-deps", "--no-warn-script-location", *options]
    install = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, env=os.environ | variables, check=True)
    return Installed(command, variables)


def pipelinerl(installed: Installed, folder: Path, *arguments: str, timeout_s: float = 120) -> tuple[int, str]:
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(installed.command), *arguments],
        cwd=folder,
        env=environment | installed.variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout + done.stderr


def test_wheel_lists_its_experiments_and_plans_one(installed: Installed, tmp_path: Path) -> None:
    code, output = pipelinerl(installed, tmp_path, "--help")
    assert (code, "quickstart " in output) == (0, True), output
    code, output = pipelinerl(installed, tmp_path, "launch", "--config-name=quickstart", "dry_run=true")
    assert code == 0, output
    assert "dry run: nothing was started or written" in output
    assert list(tmp_path.iterdir()) == []


def test_wheel_takes_configurations_of_the_users_folder(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "small.yaml").write_text("defaults: [quickstart, _self_]\nattempts: 4\n")
    arguments = ["--config-dir=mine", "--config-name=small", "--cfg=job"]
    code, output = pipelinerl(installed, tmp_path, "launch", *arguments)
    assert (code, "attempts: 4" in output) == (0, True), output


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("installed", ["venv"], indirect=True)
def test_wheel_does_the_quickstart(installed: Installed, tmp_path: Path) -> None:
    arguments = ["--config-name=quickstart", "output_dir=run", "seed=0"]
    code, output = pipelinerl(installed, tmp_path, "launch", *arguments, timeout_s=1100)
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["optimizer_steps"] == 160
    assert summary["success_after"] > summary["success_before"] + 0.2
