"""Makes `.venv` with the versions of a lock: `python3 tools/install.py cpu,test`. Any Python from 3.8 on can run it.

The one place that decides where packages come from: `make`, the Dockerfile and CI call it. It uses uv where uv is
installed, else pip. Both install exactly what requirements/cpu.lock or gpu.lock lists and resolve nothing, so packages
that the lock leaves out never come. uv gets the settings of pip, so one configuration serves both.

The CPU build of torch (2.13.0+cpu) is not on the public package index. Where the index that is set up has it, it comes
from there. Else it, and nothing else, comes from PyTorch's own CPU index. A machine that cannot reach that index is
told so within `PAGE_LIMIT_S`.
"""

from __future__ import annotations

import argparse
import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("cpu", "gpu")
SUPPORTED = ((3, 11), (3, 12))
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PAGE_LIMIT_S = 20


# What is to be installed.


def read_lock(text: str, extras: set[str]) -> tuple[set[str], list[str]]:
    """Return the extras that a lock knows and its requirements for some of them.

    A line is `name==version`, perhaps with a marker. Behind ` # ` stand the extras that need it, or nothing: all do.
    """
    first, *lines = text.splitlines()
    known = set(first.partition(": ")[2].split())
    wanted = []
    for line in lines:
        requirement, _, needed_by = line.partition(" # ")
        if not needed_by or extras & set(needed_by.split()):
            wanted.append(requirement.strip())
    return known, wanted


def chosen_platform(extras: set[str]) -> str:
    chosen = extras & set(PLATFORMS)
    if len(chosen) != 1:
        sys.exit(f"EXTRAS={','.join(sorted(extras))} has to name one of {' and '.join(PLATFORMS)}: the build of vLLM")
    return chosen.pop()


# Where packages come from.


def pip_settings(environment: dict[str, str], venv: Path) -> dict[str, str]:
    """What pip's files and variables say, a later place over an earlier one, as pip reads them for `pip install`."""
    home = Path(os.path.expanduser(environment.get("HOME") or "~"))  # pathlib raises where there is no home
    own = environment.get("PIP_CONFIG_FILE", "")
    users = [home / ".pip/pip.conf", Path(environment.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"]
    of_all = [Path(folder) / "pip/pip.conf" for folder in (environment.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    files = [*of_all, Path("/etc/pip.conf"), *([] if os.path.exists(own) else users), venv / "pip.conf", Path(own)]
    parser = configparser.RawConfigParser()
    parser.read([] if own == os.devnull else files)
    settings = {}
    for section in ("global", "install"):
        if parser.has_section(section):
            settings.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    variables = {name: value for name, value in environment.items() if name.startswith("PIP_") and value}
    settings.update({name[4:].lower().replace("_", "-"): value for name, value in variables.items()})
    return settings


def is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")


def uv_settings(pip: dict[str, str]) -> dict[str, str]:
    """The variables of uv that mean what pip's settings mean."""
    said = {
        "UV_INDEX_URL": pip.get("index-url", ""),
        "UV_EXTRA_INDEX_URL": " ".join(pip.get("extra-index-url", "").split()),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
        "UV_INSECURE_HOST": " ".join(pip.get("trusted-host", "").split()),
        "UV_HTTP_TIMEOUT": pip.get("timeout", pip.get("default-timeout", "")),
        "UV_NO_CACHE": "1" if is_on(pip.get("no-cache-dir", "")) else "",
        "SSL_CERT_FILE": pip.get("cert", ""),
        "SSL_CLIENT_CERT": pip.get("client-cert", ""),
        "ALL_PROXY": pip.get("proxy", ""),
        # As pip does: the best version of all indexes, not of the first index that knows the name.
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    return {name: value for name, value in said.items() if value}


class Installer:
    """pip of an environment, or uv with the same settings. What the user has told uv itself counts more."""

    def __init__(self, uv: str | None, venv: Path) -> None:
        self.uv = uv
        self.venv = venv
        self.python = str(venv / "bin" / "python")
        pip = pip_settings(dict(os.environ), venv)
        self.no_index = is_on(pip.get("no-index", ""))
        self.environment = {**uv_settings(pip), "PIP_DISABLE_PIP_VERSION_CHECK": "1", **os.environ}

    def make_venv(self) -> None:
        """Make an environment of this Python. Where it is too old or too new, uv finds another one."""
        python = sys.executable if sys.version_info[:2] in SUPPORTED else "3.11"
        with_uv = [str(self.uv), "venv", "-q", "--python", python, str(self.venv)]
        command = with_uv if self.uv else [python, "-m", "venv", str(self.venv)]
        if subprocess.run(command, env=self.environment, check=False).returncode:
            shutil.rmtree(self.venv, ignore_errors=True)
            sys.exit(f"{self.venv} could not be made: {python} needs its venv module (Debian: python3-venv), or uv")

    def renew_pip(self, pin: str) -> None:
        """Take pip of the lock, which needs half the time. Where there is none, the pip that Python brings does it."""
        if not self.uv:
            command = [self.python, "-m", "pip", "install", "-q", pin]
            subprocess.run(command, env=self.environment, capture_output=True, check=False)

    def offers(self, pin: str, page: str | None = None) -> bool:
        """Whether the index that is set up has this version, or else one page of links, which is asked alone."""
        name, version = pin.split("==")
        asked = [*(["--no-index"] if page or self.no_index else []), *(["--find-links", page] if page else [])]
        if self.uv:
            command = [self.uv, "pip", "install", "-q", "--dry-run", "--no-deps", "--python", self.python, *asked, pin]
        else:
            quick = ["--timeout", "5", "--retries", "0"] if page else []
            command = [self.python, "-m", "pip", "index", "versions", *quick, *asked, name]
        environment = {**self.environment, **({"UV_HTTP_TIMEOUT": "5", "UV_HTTP_RETRIES": "0"} if page else {})}
        try:
            limit_s = PAGE_LIMIT_S if page else None
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=limit_s, check=False, encoding="utf-8"
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and (bool(self.uv) or version in re.findall(r"[^\s,()]+", done.stdout))

    def install(self, *arguments: str, pages: list[str]) -> None:
        # uv takes its variable for links or the option, pip adds the option to what it is set up for.
        links = [*(self.environment.get("UV_FIND_LINKS", "").split(",") if self.uv else []), *pages]
        options = [part for link in filter(None, links) for part in ("--find-links", link)]
        if self.uv:
            asked = ["--no-index"] if self.no_index else []
            command = [self.uv, "pip", "install", "-q", "--python", self.python, *asked]
        else:
            # Bytecode is left to the first import: pip makes that of every file, most of which no run reads.
            command = [self.python, "-m", "pip", "install", "-q", "--no-compile"]
        command += ["--no-deps", *options, *arguments]
        if subprocess.run(command, env=self.environment, check=False).returncode:
            sys.exit(f"the installation has failed: what {'uv' if self.uv else 'pip'} says is above")


def pages_for(installer: Installer, requirements: list[str]) -> list[str]:
    """Where to look beside the index that is set up: PyTorch's page of torch, or nowhere."""
    pin = next(one for one in requirements if one.startswith("torch=="))
    if not re.fullmatch(r"torch==[\w.]+\+cpu", pin) or installer.offers(pin):
        return []
    page = f"{os.environ.get('TORCH_CPU_INDEX', TORCH_CPU_INDEX).rstrip('/')}/torch/"
    if not installer.no_index and installer.offers(pin, page):
        print(f"{pin} is not on the package index that is set up: it comes from {page}", flush=True)
        return [page]
    tried = "and pip is told to use no other" if installer.no_index else f"and {page} cannot be reached or has none"
    sys.exit(
        f"no CPU build of torch: the package index that is set up has no {pin}, {tried}. "
        "Set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to a place that has it, "
        "or TORCH_CPU_INDEX to a copy of PyTorch's CPU index"
    )


def version_of(python: Path) -> tuple[int, ...]:
    """(3, 11), or nothing where there is no Python that runs."""
    command = [str(python), "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(map(int, done.stdout.split()))


def main() -> None:
    """Make or complete the environment, or do nothing where it is what is asked for."""
    parser = argparse.ArgumentParser(description="Install PipelineRL in an environment of its own.")
    parser.add_argument("extras", help="cpu or gpu and others of pyproject.toml, with commas: cpu,test")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment, made where missing")
    options = parser.parse_args()
    extras = set(filter(None, re.split(r"[,\s]+", options.extras)))
    venv = options.venv.absolute()

    platform = chosen_platform(extras)
    lock = ROOT / "requirements" / f"{platform}.lock"
    known, requirements = read_lock(lock.read_text(encoding="utf-8"), extras)
    unknown = extras - known - {platform}
    if unknown:
        sys.exit(f"EXTRAS: {lock.name} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")

    installer = Installer(shutil.which("uv"), venv)
    here = sys.version_info[:2]
    if here not in SUPPORTED and not installer.uv:
        is_called = f"{sys.executable} is Python {here[0]}.{here[1]}"
        sys.exit(f"{is_called}: 3.11 or 3.12 is needed. Set PYTHON=…, or install uv, which finds one")
    stamp = venv / ".installed"
    contents = [lock.read_bytes(), (ROOT / "pyproject.toml").read_bytes(), str(ROOT).encode()]
    state = hashlib.sha256(b"".join(contents)).hexdigest()
    before, *there = (stamp.read_text(encoding="utf-8").split() if stamp.exists() else []) or [""]
    version = version_of(venv / "bin" / "python")
    fits = version == here if here in SUPPORTED else version in SUPPORTED
    if fits and before == state and extras <= set(there):
        return
    if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
        sys.exit(f"{venv} is there and no environment of Python: name another folder")
    usable = fits and not set(there) & set(PLATFORMS) - {platform} and (installer.uv or (venv / "bin" / "pip").exists())
    if venv.exists() and not usable:
        print(f"{venv} is of another Python or platform, or not whole: building it anew", flush=True)
        if venv.is_symlink():
            venv.unlink()
        else:
            shutil.rmtree(venv)
    stamp.unlink(missing_ok=True)
    if not venv.exists():
        installer.make_venv()

    pages = pages_for(installer, requirements)
    tool = "uv" if installer.uv else "pip"
    print(f"installing {len(requirements)} packages of {lock.name} into {venv} with {tool}", flush=True)
    pins = read_lock(lock.read_text(encoding="utf-8"), known)[1]
    installer.renew_pip(next(one for one in pins if one.startswith("pip==")))
    installer.install(*requirements, pages=pages)
    # The lock has setuptools, so the package needs no environment of its own to be built in.
    installer.install("--no-build-isolation", "-e", str(ROOT), pages=pages)
    now_there = extras.union(there) if usable and before == state else extras
    stamp.write_text(" ".join([state, *sorted(now_there)]), encoding="utf-8")


if __name__ == "__main__":
    main()
