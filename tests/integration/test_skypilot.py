"""The rendered task is one that SkyPilot's own package reads. It needs other pins than ours: an environment of its own.

`SKY_PYTHON` names an interpreter that has `skypilot`. Without it the test makes an environment from the package index.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.skypilot import render

SKYPILOT = "skypilot==0.14.1"
READ = """
import json, sys
import sky
config = json.load(sys.stdin)
task = sky.Task.from_yaml_config(config, secrets_overrides=[("PIPELINERL_SECRET", "of this test")])
(resources,) = task.resources
print(json.dumps({
    "nodes": task.num_nodes, "accelerators": resources.accelerators, "cpus": resources.cpus,
    "image": resources.image_id, "run": task.run, "secrets": list(task.secrets),
}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has SkyPilot."""
    if given := os.environ.get("SKY_PYTHON"):
        return given
    place = tmp_path_factory.mktemp("sky") / "env"
    venv.create(place, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "-q", SKYPILOT]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{SKYPILOT} cannot be installed here: {done.stderr[-300:]}")
    return str(place / "bin" / "python")


def read(python: str, document: str, home: Path) -> "subprocess.CompletedProcess[str]":
    """SkyPilot's own reading of a task. It keeps its state below HOME."""
    return subprocess.run(
        [python, "-c", READ],
        input=json.dumps(yaml.safe_load(document)),
        env={"HOME": str(home), "PATH": "/usr/bin:/bin"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )


def test_skypilot_reads_the_task_and_refuses_an_unknown_field(python: str, tmp_path: Path) -> None:
    arguments = ("--config-name=base_2node", "output_dir=/results/base")
    deployment = Deployment(arguments=arguments, name="base", nodes=2, gpus_per_node=8, image="registry/prl:1")
    document = render(deployment)
    done = read(python, document, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    task = json.loads(done.stdout.splitlines()[-1])
    assert (task["nodes"], task["accelerators"], task["cpus"]) == (2, {"H100": 8}, f"{deployment.cores}+")
    assert task["secrets"] == ["PIPELINERL_SECRET"]
    assert "registry/prl:1" in str(task["image"])
    assert "pipelinerl.launch --config-name=base_2node" in task["run"]
    wrong = read(python, document + "nodes: 2\n", tmp_path)
    assert wrong.returncode != 0
    assert "nodes" in wrong.stderr
