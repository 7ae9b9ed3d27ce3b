"""An environment with the libraries of other projects, over the packages of the running interpreter.

Some of them need other versions than the lock has (`verifiers` wants an older `openai`), so they are not installed
beside the tests. Set PIPELINERL_LIBRARIES to a Python that has them all to use that one.
"""

import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-libraries"
EXTRAS = ("gymnasium", "mcp", "openenv", "reasoning-gym", "sandboxes", "textarena", "verifiers")


def library_python() -> Path:
    """Returns the environment's interpreter, and makes the environment if it is not there or lacks something."""
    if given := os.environ.get("PIPELINERL_LIBRARIES"):
        return Path(given)
    python, made = FOLDER / "bin" / "python", FOLDER / "extras.txt"
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = "\n".join(requirement for extra in EXTRAS for requirement in optional[extra])
    if not made.exists() or made.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(FOLDER)], check=True)
        own = next(FOLDER.glob("lib/python*/site-packages"))
        (own / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted.splitlines()], check=True)
        made.write_text(wanted)
    return python


def run_there(*arguments: str, folder: Path = ROOT, timeout_s: float) -> str:
    """Runs Python with the libraries in ``folder`` and returns what it printed. It must end well."""
    python = library_python()
    path = f"{ROOT}{os.pathsep}{folder}"
    home = folder / "home"  # caches of the libraries
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
