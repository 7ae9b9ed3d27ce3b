"""Writes requirements/cpu.lock, gpu.lock and clients.lock, for Python 3.11 and 3.12 on x86_64 and aarch64: `make lock`.

It needs uv, and beside the package index one that has the CPU builds of torch for all of these, as PyTorch's own has.

A pin stays where `pyproject.toml` still allows it: remove the lines of what is to move, lock, install, test.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "requirements"
OUT = {
    # Of these the public package index has CUDA builds only. They cannot load beside CPU torch and break the import of
    # transformers' models. Text models need none of them.
    "cpu": ["torchvision", "torchaudio", "torchcodec"],
    "gpu": [],
}
MORE = {
    # The wheels of intel-openmp differ in what they ask for, and uv reads one of them.
    "cpu": ["torch==2.13.0+cpu", "intel-cmplr-lib-ur==2024.2.1; platform_machine == 'x86_64'"],
    "gpu": ["torch!=2.13.0+cpu"],
}
NOT_LOCKED = {"flash", "gymnasium", "openenv", "reasoning-gym", "sandboxes", "textarena", "verifiers"}
"""flash is built on the machine, against the torch that is there. Of the libraries one wants an older openai, and none
is needed by the tests."""
MACHINES = ("x86_64", "aarch64")
PYTHONS = ("3.11.0", "3.11.2", "3.11.4", "3.11.9", "3.12.0", "3.12.12")


def extras_of(project: dict) -> dict[str, set[str]]:
    """Extra → names of the packages that it asks for itself, and through other extras of this project."""
    optional = project["optional-dependencies"]

    def names(extra: str) -> set[str]:
        found = set()
        for text in optional[extra]:
            if text.startswith("pipelinerl["):
                found |= set().union(*(names(other) for other in text[text.index("[") + 1 : -1].split(",")))
            else:
                found.add(name_of(text))
        return found

    return {extra: names(extra) for extra in optional}


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def needed(roots: set[str], parents: dict[str, set[str]]) -> set[str]:
    """The roots and everything that they need, over any number of steps."""
    found = roots
    while (more := {name for name, asking in parents.items() if asking & found} | found) != found:
        found = more
    return found


def line_of(pin: str, needed_by: list[str]) -> str:
    """A line of the lock, without a marker where that always holds. Nothing for a pin that is needed nowhere."""
    pinned, _, marker = pin.strip().partition(" ; ")
    linux = {"sys_platform": "linux", "platform_system": "Linux", "implementation_name": "cpython"}
    holds = {
        not marker or Marker(marker).evaluate({**linux, **python, "platform_machine": machine})
        for python in ({"python_full_version": full, "python_version": full[:4]} for full in PYTHONS)
        for machine in MACHINES
    }
    if pinned == "torch==2.13.0":  # Not the CPU build, where an index has both.
        pinned += ",!=2.13.0+cpu"
    if not any(holds):
        return ""
    return pinned + ("" if all(holds) else f" ; {marker}") + (f" # {' '.join(needed_by)}" if needed_by else "") + "\n"


def resolve(platform: str, extras: list[str], folder: Path) -> list[str]:
    """Lines `name==version[ ; marker]  # via a, b` of uv, for every Python and machine that is supported."""
    lock = FOLDER / f"{platform}.lock"
    pins = (
        [line.partition(" # ")[0] for line in lock.read_text(encoding="utf-8").splitlines()[1:]]
        if lock.exists()
        else []
    )
    asked = [f"pipelinerl[{','.join(extras)}] @ {ROOT.as_uri()}", *MORE[platform]]
    (folder / "in").write_text("\n".join(asked), encoding="utf-8")
    (folder / "pins").write_text("\n".join(pins), encoding="utf-8")
    (folder / "out").write_text(
        "".join(f"{name}; sys_platform == 'never'\n" for name in OUT[platform]), encoding="utf-8"
    )
    linux = [f"sys_platform == 'linux' and platform_machine == '{machine}'" for machine in MACHINES]
    (folder / "pyproject.toml").write_text(f"[tool.uv]\nenvironments = {linux}\n", encoding="utf-8")
    command = ["uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--no-header"]
    command += ["--annotation-style", "line", "--index-strategy", "unsafe-best-match"]
    command += ["--override", "out", "--output-file", "pins", "in"]
    if subprocess.run(command, cwd=folder, check=False).returncode:
        sys.exit(f"no lock for {platform}: what uv says is above")
    return (folder / "pins").read_text(encoding="utf-8").splitlines()


def lock_clients() -> None:
    """Write the lock of the environment that has nothing of this package."""
    command = ["uv", "pip", "compile", "-q", "--universal", "--python-version", "3.11", "--no-header", "--no-annotate"]
    command += ["--index-strategy", "unsafe-best-match", "--group", "clients"]
    if subprocess.run([*command, "--output-file", str(FOLDER / "clients.lock")], cwd=ROOT, check=False).returncode:
        sys.exit("no lock for the clients: what uv says is above")


def main() -> None:
    """Write the locks."""
    lock_clients()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    of_extra = {name: roots for name, roots in extras_of(project).items() if name not in NOT_LOCKED}
    base = {name_of(text) for text in project["dependencies"]}
    FOLDER.mkdir(exist_ok=True)
    for platform, other in (("cpu", "gpu"), ("gpu", "cpu")):
        extras = sorted(of_extra.keys() - {platform, other})
        with tempfile.TemporaryDirectory() as folder:
            lines = resolve(platform, [platform, *extras], Path(folder))
        parted = [line.partition("  # via ")[::2] for line in lines if not line.startswith("pipelinerl ")]
        parents = {}
        for pin, asking in parted:
            parents.setdefault(name_of(pin), set()).update(name_of(name) for name in asking.split(", "))
        always = needed(base | of_extra[platform] | {name_of(text) for text in MORE[platform]}, parents)
        sets = {extra: needed(of_extra[extra], parents) for extra in extras}
        text = f"# Written by `make lock`. Extras: {' '.join(extras)}\n"
        for pin, _ in parted:
            name = name_of(pin)
            wanted = [] if name in always else [extra for extra in extras if name in sets[extra]]
            text += line_of(pin, wanted)
        (FOLDER / f"{platform}.lock").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
