"""Rendered documents: what each platform is told, and that no secret and no unknown setting is in them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelinerl.errors import ConfigError
from pipelinerl.membership.joining import read_span
from pipelinerl.observability.role import role_parser
from pipelinerl.render.__main__ import TARGETS, main
from pipelinerl.render.deployment import Deployment
from pipelinerl.streams.spec import run_key
from pipelinerl.world import Span

ARGUMENTS = ("--config-name=base", "output_dir=/results/a run", "finetune.learning_rate=1e-6")


def deployment(**fields) -> Deployment:
    return Deployment(**({"arguments": ARGUMENTS, "name": "guess", "nodes": 2, "image": "registry/prl:1"} | fields))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_documents_hold_no_secret(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SECRET", "a-secret-of-this-test")
    assert "a-secret-of-this-test" not in TARGETS[target](deployment(extra_servers=1))


def test_slurm_script_asks_for_the_machines_and_keeps_the_arguments_whole(tmp_path: Path) -> None:
    script = TARGETS["slurm"](deployment(gpus_per_node=8, hours=3))
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    for wanted in ("--nodes=2", "--gpus-per-node=8", "--time=3:00:00", "--signal=B:TERM@180", "--requeue"):
        assert wanted in directives
    path = tmp_path / "run.sbatch"
    path.write_text(script)
    subprocess.run(["bash", "-n", str(path)], check=True)
    head = script[: script.index("set -euo pipefail")]
    shown = subprocess.run(
        ["bash", "-c", head + 'printf "%s\\n" "${PRL_ARGUMENTS[@]}"'], capture_output=True, text=True
    )
    assert tuple(shown.stdout.splitlines()) == ARGUMENTS


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_slurm_script_has_no_known_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.sbatch").write_text(TARGETS["slurm"](deployment()))
    subprocess.run(["shellcheck", "-s", "bash", str(tmp_path / "run.sbatch")], check=True)


def test_jobset_is_a_gang_that_knows_its_ranks_and_peers() -> None:
    (gang,) = yaml.safe_load_all(TARGETS["jobset"](deployment(gpus_per_node=8)))
    job = gang["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = job["template"]["spec"]["containers"][0]
    environment = {item["name"]: item for item in container["env"]}
    assert (gang["apiVersion"], gang["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert environment["PIPELINERL_HOSTS"]["value"] == "guess-nodes-0-0.guess,guess-nodes-0-1.guess"
    assert environment["WORLD_SIZE"]["value"] == "2"
    assert environment["PIPELINERL_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": "guess", "key": "secret"}}
    assert container["command"][:6] == ["python", "-m", "pipelinerl.launch", *ARGUMENTS]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "world.run_id=guess" in container["command"]


def test_jobset_servers_join_by_the_runs_address() -> None:
    _, servers = yaml.safe_load_all(TARGETS["jobset"](deployment(extra_servers=3)))
    container = servers["spec"]["template"]["spec"]["containers"][0]
    address = f"redis://guess-nodes-0-0.guess:15000/{run_key('/results/a run', 'guess')}"
    assert servers["spec"]["replicas"] == 3
    assert container["command"] == [
        *("python", "-m", "pipelinerl.inference", "--run", address, "--run-dir", "/tmp/run"),
        *("--job", "actor_llm", "--host", "$(POD_IP)"),
    ]


def test_servers_on_several_nodes_are_told_their_place_by_leader_worker_set() -> None:
    _, servers = yaml.safe_load_all(TARGETS["jobset"](deployment(extra_servers=3, nodes_per_server=2)))
    (container,) = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    words = " ".join(container["command"])
    for name, value in (("LWS_GROUP_SIZE", "2"), ("LWS_WORKER_INDEX", "1"), ("LWS_LEADER_ADDRESS", "guess-servers-0")):
        words = words.replace(f"$({name})", value)
    arguments = role_parser().parse_args(words.partition("pipelinerl.inference ")[2].replace("a run", "a_run").split())
    assert (arguments.job, arguments.host) == ("actor_llm", "$(POD_IP)")
    span = read_span(arguments.nodes, arguments.node, arguments.meet)
    assert span == Span(nodes=2, node=1, host="guess-servers-0", port=15100)


def test_single_node_of_a_gang_listens_beyond_itself() -> None:
    (gang,) = yaml.safe_load_all(TARGETS["jobset"](deployment(nodes=1)))
    container = gang["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert "world.hosts=[guess-nodes-0-0.guess]" in container["command"]


def test_skypilot_task_names_nodes_accelerators_and_the_secret() -> None:
    task = yaml.safe_load(TARGETS["skypilot"](deployment(gpus_per_node=4, gpu="A100")))
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "A100:4"
    assert task["secrets"] == {"PIPELINERL_SECRET": None}
    shown = subprocess.run(
        ["bash", "-c", task["run"].replace("python -m", "echo $RANK $PIPELINERL_HOSTS")],
        env={"PATH": "/usr/bin:/bin", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
        | {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith("1 10.0.0.1,10.0.0.2 pipelinerl.launch --config-name=base output_dir=/results/a run")


def test_what_cannot_be_rendered_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="output_dir=… is missing"):
        main(["--target", "slurm", "--", "--config-name=base"])
    with pytest.raises(ConfigError, match="--name 'My Run'"):
        main(["--target", "slurm", "--name", "My Run", "--", "output_dir=x"])
    with pytest.raises(ConfigError, match="--image is missing"):
        main(["--target", "jobset", "--", "output_dir=x"])
    assert main(["--target", "slurm", "--", "--config-name=base", "output_dir=/x"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH")
