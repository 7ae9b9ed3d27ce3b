"""The Dockerfile's RUN lines, executed as a script in an empty environment. No image is built and nothing is isolated.

`apt-get` is a stand-in that simulates the installation, which finds a package that does not exist and changes nothing.
"""

import os
import re
import shutil
import stat
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = '#!/bin/sh\ncase "$1" in update) ;; *) exec /usr/bin/apt-get --simulate "$@" ;; esac\n'


def run_lines(text: str) -> list[str]:
    """Shell commands of the RUN lines, without BuildKit's options."""
    whole = re.sub(r"\s*\\\n\s*", " ", text)
    return [re.sub(r"--mount=\S+\s+", "", line) for line in re.findall(r"^RUN (.*)$", whole, re.MULTILINE)]


def defaults(text: str) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))


def test_run_lines_join_and_lose_their_options() -> None:
    text = "FROM x\nRUN --mount=type=tmpfs,target=/a one && \\\n  two\nRUN three\n"
    assert run_lines(text) == ["one && two", "three"]


def test_dockerfile_installs_under_the_lock_and_starts_the_command() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert any("tools/install.py" in line for line in run_lines(text)), "the one place that decides"
    assert "ENV PATH=/opt/pipelinerl/.venv/bin:$PATH" in text
    assert 'ENTRYPOINT ["pipelinerl"]' in text
    assert defaults(text)["EXTRAS"].startswith("cpu")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not shutil.which("apt-get"), reason="the RUN lines are Debian's")
def test_dockerfile_run_lines_give_a_working_command(tmp_path: Path) -> None:
    text = (ROOT / "Dockerfile").read_text()
    source, bin_dir = tmp_path / "source", tmp_path / "env" / "bin"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
    venv.create(tmp_path / "env", with_pip=True, symlinks=True)
    (bin_dir / "apt-get").write_text(SIMULATED)
    (bin_dir / "apt-get").chmod(stat.S_IRWXU)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    made = source / ".venv" / "bin"
    environment |= {"PATH": f"{made}:{bin_dir}:{environment['PATH']}", **defaults(text)}

    def run(folder: Path, *command: str) -> str:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run(source, "sh", "-c", "\n".join(["set -eu", *run_lines(text)]))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert "quickstart" in run(elsewhere, "pipelinerl", "--help")
    assert "dry run" in run(elsewhere, "pipelinerl", "launch", "--config-name=quickstart", "dry_run=true")
