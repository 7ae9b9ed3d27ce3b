"""The locks pin what every extra needs on each supported Python and machine, as `pyproject.toml` allows."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import install

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {"cpu": {"torchvision", "torchaudio", "torchcodec"}, "gpu": set()}
"""See tools/lock.py."""
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython", "extra": ""}
PLACES = [
    {**LINUX, "python_full_version": full, "python_version": full[:4], "platform_machine": machine}
    for full in ("3.11.0", "3.11.9", "3.12.9")
    for machine in ("x86_64", "aarch64")
]


def locked(platform: str, extras: set[str], place: dict[str, str]) -> dict[str, str]:
    """Name → version of what is installed there for some extras."""
    text = (ROOT / "requirements" / f"{platform}.lock").read_text()
    found = [Requirement(line) for line in install.read_lock(text, extras)[1]]
    return {
        one.name: next(each.version for each in one.specifier if each.operator == "==")
        for one in found
        if one.marker is None or one.marker.evaluate(place)
    }


def own_requirements(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    found = [Requirement(text) for text in project["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, optional[extra]):
            found += own_requirements(*requirement.extras) if requirement.name == "pipelinerl" else [requirement]
    return found


@pytest.mark.parametrize("platform", install.PLATFORMS)
def test_every_line_of_a_lock_is_a_pin(platform: str) -> None:
    first, *lines = (ROOT / "requirements" / f"{platform}.lock").read_text().splitlines()
    assert first.startswith("# Written by `make lock`. Extras: ")
    assert [
        line for line in lines if not re.match(r"[a-z0-9-]+==[\w.+]+(,!=\S+)?( ; [^#]+)?( # [a-z0-9 ]+)?$", line)
    ] == []


@pytest.mark.parametrize("platform", install.PLATFORMS)
def test_every_extra_finds_what_it_asks_for(platform: str) -> None:
    known, _ = install.read_lock((ROOT / "requirements" / f"{platform}.lock").read_text(), set())
    asked = {extra: own_requirements(platform, extra) for extra in known}
    for extra, requirements in asked.items():
        for place in PLACES:
            pins = locked(platform, {platform, extra}, place)
            for one in requirements:
                version = pins.get(canonicalize_name(one.name), "nothing")
                fits = version != "nothing" and one.specifier.contains(version, prereleases=True)
                assert fits, f"{extra} asks for {one}, and {platform}.lock has {version}: run `make lock`"


def test_the_clients_are_pinned_as_their_group_asks() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["clients"]
    lines = (ROOT / "requirements" / "clients.lock").read_text().splitlines()
    pins = {one.name: one.specifier for one in map(Requirement, lines)}
    for one in map(Requirement, group):
        (pin,) = pins[canonicalize_name(one.name)]
        assert pin.operator == "=="
        assert one.specifier.contains(pin.version), f"{one} is asked for, {pin} is locked: run `make lock`"


@pytest.mark.parametrize("place", PLACES, ids=lambda one: f"{one['python_full_version']}-{one['platform_machine']}")
def test_lock_has_everything_that_is_needed_by_what_it_has(place: dict[str, str]) -> None:
    pins = locked("cpu", {"test"}, place)
    missing = set()
    for name in pins:
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # an environment of other extras
            continue
        for requirement in map(Requirement, needs):
            wanted = requirement.marker is None or requirement.marker.evaluate(place)
            if wanted and canonicalize_name(requirement.name) not in {*pins, *LEFT_OUT["cpu"]}:
                missing.add(f"{name} needs {requirement.name}")
    assert missing == set()


def test_lines_are_taken_for_all_or_for_their_extras() -> None:
    text = "# Written. Extras: lora redis\na==1\nb==2 ; python_version < '3' # lora\nc==3 # redis lora\nd==4 # redis\n"
    assert install.read_lock(text, {"cpu"}) == ({"lora", "redis"}, ["a==1"])
    assert install.read_lock(text, {"cpu", "lora"})[1] == ["a==1", "b==2 ; python_version < '3'", "c==3"]


def test_settings_of_pip_become_those_of_uv() -> None:
    pip = {"index-url": "https://a/simple", "extra-index-url": "https://b\nhttps://c", "find-links": "/w https://d/"}
    assert install.uv_settings({**pip, "cert": "/c.pem", "no-cache-dir": "true"}) == {
        "UV_INDEX_URL": "https://a/simple",
        "UV_EXTRA_INDEX_URL": "https://b https://c",
        "UV_FIND_LINKS": "/w,https://d/",
        "UV_NO_CACHE": "1",
        "SSL_CERT_FILE": "/c.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_settings_of_pip_are_read_as_pip_reads_them(tmp_path: Path) -> None:
    """Sections: install over global. Places: variables over files, the environment's file over the user's."""
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / ".config/pip/pip.conf").write_text("[global]\nindex-url = u\ntimeout = 5\n[install]\nfind_links = i\n")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv/pip.conf").write_text("[global]\ntimeout = 7\nfind-links = g\n")
    seen = install.pip_settings(
        {"HOME": str(tmp_path), "PIP_INDEX_URL": "v", "XDG_CONFIG_DIRS": "/n"}, tmp_path / "venv"
    )
    assert {name: seen[name] for name in ("index-url", "timeout", "find-links")} == {
        "index-url": "v",
        "timeout": "7",
        "find-links": "i",
    }
    assert install.pip_settings({"HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}, tmp_path / "venv") == {
        "config-file": "/dev/null"
    }


def test_pip_settings_without_a_home_are_those_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # an unknown user id
    assert install.pip_settings({"PIP_TIMEOUT": "3"}, tmp_path)["timeout"] == "3"
