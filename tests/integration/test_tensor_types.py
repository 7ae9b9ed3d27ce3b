"""`make check` knows torch: what no tensor or module has is an error, as it is for the package's own classes."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTATED = """
import torch
from torch import Tensor, nn

from pipelinerl.finetune.rl.head import LogitMap


def detached(states: Tensor) -> Tensor:
    return states.detachh()


def summed(states: Tensor) -> str:
    return states.sum(dim=1)


def widths(layer: nn.Linear) -> int:
    return layer.in_feature + len(torch.aranges(3))


def right(states: Tensor) -> Tensor:
    return LogitMap(scale=2.0).apply_(states.detach().float()).softmax(-1)
"""


def test_misspelt_tensor_methods_do_not_pass(tmp_path: Path) -> None:
    """With the settings of `pyproject.toml`, and its cache when `make check` has made one."""
    settings = (ROOT / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(re.sub(r"packages = .*\n", "", settings, count=1))
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "pyproject.toml"), "-c", MUTATED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    errors = [line for line in done.stdout.splitlines() if line.startswith("<string>")]
    assert done.returncode == 1, done.stdout + done.stderr
    assert '"Tensor" has no attribute "detachh"' in errors[0]
    assert 'expected "str"' in errors[1]
    assert any('Module has no attribute "aranges"' in line for line in errors)
    assert not any(line.startswith("<string>:21") for line in errors)
