"""Every command of docs/migrating.md does what the page says, and its tables are those of the code."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, validate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
README_EXAMPLE = """\
defaults:
    - base
    - _self_
actor:
    rollout_policy: pipelinerl.domains.guessing.generate_guessing_rollout
environment: null
dataset_loader: pipelinerl.domains.guessing.load_problems
train_dataset_names:
    - train
test_dataset_names:
    - test
"""


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with an old experiment, and what the page's first command makes of it."""
    folder = tmp_path_factory.mktemp("migrated")
    (folder / "old").mkdir()
    (folder / "conf").mkdir()
    (folder / "old" / "guessing.yaml").write_text(README_EXAMPLE)
    done = execute(commands()[0], folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(migrated: Path, tmp_path: Path) -> Path:
    return shutil.copytree(migrated, tmp_path, dirs_exist_ok=True)


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = command.replace("pipelinerl ", f"{shlex.quote(sys.executable)} -m pipelinerl ", 1)
    env = os.environ | {"PYTHONPATH": str(PAGE.parents[1]), "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(["bash", "-c", program], cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_page_begins_with_the_migration_and_has_refusals() -> None:
    assert commands()[0].startswith("pipelinerl migrate old/guessing.yaml > ")
    assert sum(command.endswith("# refused") for command in commands()) == 3


@pytest.mark.parametrize("command", commands()[1:])
def test_command_does_what_the_page_says(command: str, folder: Path) -> None:
    done = execute(command, folder)
    if command.endswith("# refused"):
        assert done.returncode == 2
        assert "PipelineRL's" in done.stderr
    elif command.startswith("pipelinerl migrate"):
        assert done.returncode == 0, done.stderr
        assert (folder / "new" / "guessing.yaml").is_file()
    else:
        assert done.returncode == 0, done.stderr
        assert "nothing was started" in done.stdout


def test_example_of_the_readme_is_valid_after_the_migration_alone(folder: Path) -> None:
    config = validate(compose("my_guessing", ["output_dir=x"], config_dir=folder / "conf"))
    assert config.batch_size == 1024
    assert config.eval_every_n_versions == 77  # 78,000 samples = 76.2 steps
    assert (config.finetune.rl.policy_loss, config.finetune.rl.ratio_clamp) == ("reinforce", 1.02)
    assert (config.finetune.gradient_clipping_threshold, config.finetune.optimizer.weight_decay) == (0.3, 0.01)
    assert config.test_llm.parameters["top_k"] == 50
