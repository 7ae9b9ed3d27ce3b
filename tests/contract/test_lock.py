"""`requirements.lock` pins what `.[cpu,test]` needs, in versions that `pyproject.toml` allows."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NOT_LOADED = {"torchvision", "torchaudio", "torchcodec"}
"""Uninstalled after the installation: see the Makefile."""


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines), "one pin a line, no index, no path"
    return dict(line.split("==") for line in lines)


def own_requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    found = [Requirement(text) for text in project["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, optional[extra]):
            found += own_requirements(*requirement.extras) if requirement.name == "pipelinerl" else [requirement]
    return found


def test_lock_allows_what_the_project_asks_for() -> None:
    locked = pins()
    for requirement in own_requirements("cpu", "test"):
        version = locked.get(canonicalize_name(requirement.name), "nothing")
        fits = version != "nothing" and requirement.specifier.contains(version)
        assert fits, f"{requirement} is asked for, and requirements.lock has {version}: run `make lock`"


def test_lock_has_everything_that_is_needed_by_what_it_has() -> None:
    locked = pins()
    missing = set()
    for name in locked:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # an environment of other extras
            continue
        for requirement in map(Requirement, needs):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and canonicalize_name(requirement.name) not in {*locked, *NOT_LOADED}:
                missing.add(f"{name} needs {requirement.name}")
    assert missing == set()
