"""Rendered documents: what each platform is told, and that no secret and no unknown setting is in them."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipelinerl.errors import ConfigError
from pipelinerl.launcher.command_line import quoted
from pipelinerl.launcher.render.command import TARGETS, main
from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.membership.joining import read_span
from pipelinerl.membership.role import role_parser
from pipelinerl.streams.spec import run_key
from pipelinerl.world import Span
from tests.says import says

ARGUMENTS = ("--config-name=base", "output_dir=/results/a run", "finetune.learning_rate=1e-6")


def deployment(**fields) -> Deployment:
    return Deployment(**({"arguments": ARGUMENTS, "name": "guess", "nodes": 2, "image": "registry/prl:1"} | fields))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_documents_hold_no_secret(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPELINERL_SECRET", "a-secret-of-this-test")
    assert "a-secret-of-this-test" not in TARGETS[target](deployment(extra_servers=1))


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_literal_secret_in_the_arguments_is_refused_wherever_the_configuration_is(target: str) -> None:
    override = "+dataset_loader_params.servers.docs.headers.Authorization=planted-4711"
    for first in ("--config-name=base", "--config-name=only_in_the_image"):
        with pytest.raises(ConfigError, match=says("headers.Authorization", "{env: NAME}")) as refused:
            TARGETS[target](deployment(arguments=(first, "output_dir=/results/x", override), cpus_per_node=8))
        assert "planted-4711" not in str(refused.value)


@pytest.mark.parametrize("name", ["base", "only_in_the_image"])
def test_documents_ask_for_the_variables_of_references(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCS_AUTH", "planted-4711")
    override = "+dataset_loader_params.servers={docs: {headers: {Authorization: {env: DOCS_AUTH}}}}"
    one = deployment(arguments=(f"--config-name={name}", "output_dir=/results/x", override), extra_servers=1)
    documents = {target: render(one) for target, render in TARGETS.items()}
    assert [target for target, document in documents.items() if "planted-4711" in document] == []
    pods = list(yaml.safe_load_all(documents["jobset"]))
    gang, server = pods[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"], pods[1]["spec"]["template"]
    for pod in (gang, server):
        variables = {each["name"]: each for each in pod["spec"]["containers"][0]["env"]}
        wanted = {"secretKeyRef": {"name": "guess", "key": "DOCS_AUTH", "optional": True}}
        assert variables["DOCS_AUTH"]["valueFrom"] == wanted


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


@pytest.mark.parametrize(
    "folder", ["/results/a run", "/results/a=b,c", "/results/数学", '/results/[1] #2\'s "x" 100%', "/results/{a}/"]
)
def test_documents_name_the_folder_that_the_command_line_means(folder: str) -> None:
    arguments = ("--config-name=base", "output_dir=/first", f"++output_dir={quoted(folder)}")
    _, servers = yaml.safe_load_all(TARGETS["jobset"](deployment(arguments=arguments, extra_servers=1)))
    (container,) = servers["spec"]["template"]["spec"]["containers"]
    assert container["command"][4] == f"redis://guess-nodes-0-0.guess:15000/{run_key(folder, 'guess')}"


@pytest.mark.parametrize("value", ["~/x", "/a,/b", "[/a]", "null"])
def test_folder_that_is_no_text_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=says("output_dir")):
        deployment(arguments=("--config-name=base", f"output_dir={value}"))


@pytest.mark.parametrize("value", ['"~/x"', "'${oc.env:SCRATCH}/x'"])
def test_folder_that_only_the_machines_know_is_refused_in_a_document_that_has_its_path(value: str) -> None:
    arguments = ("--config-name=base", f"output_dir={value}")
    with pytest.raises(ConfigError, match=says("output_dir", "write it out")):
        TARGETS["jobset"](deployment(arguments=arguments, extra_servers=1))
    assert TARGETS["slurm"](deployment(arguments=arguments))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_slurm_script_has_no_known_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.sbatch").write_text(TARGETS["slurm"](deployment()))
    subprocess.run(["shellcheck", "-s", "bash", str(tmp_path / "run.sbatch")], check=True)


def run_script(folder: Path, launchers: int, steps: int) -> "subprocess.CompletedProcess[str]":
    """Run the script with shell scripts for SLURM's commands, whose launchers and steps end with these codes."""
    (folder / "bin").mkdir()
    commands = {
        "srun": f"""case "$*" in *" true") exit {steps} ;; esac
        echo "$*"; until [[ $1 == bash ]]; do shift; done
        SLURM_NODEID=1 "$@" || echo "the code of node 1 counts"
        SLURM_NODEID=0 exec "$@" """,
        "py": f'echo "py $*"; exit {launchers}',
        "scontrol": 'echo "scontrol $*"',
        "sleep": "exit 0",
    }
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    script = TARGETS["slurm"](deployment(arguments=("output_dir=/x",), workdir=str(folder), python="py"))
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    env = variables | {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    return subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("launchers", "steps", "requeued"),
    [(0, 0, False), (1, 0, False), (1, 1, True), (0, 1, False), (2, 1, False), (143, 1, False)],
)
def test_slurm_job_ends_as_its_launchers_and_is_queued_again_where_a_node_is_lost(
    launchers: int, steps: int, requeued: bool, tmp_path: Path
) -> None:
    done = run_script(tmp_path, launchers, steps)
    assert done.returncode == launchers, done.stderr
    assert "the code of node 1 counts" not in done.stdout
    assert "--nodes=2 --ntasks-per-node=1" in done.stdout
    assert "py -m pipelinerl.launch output_dir=/x" in done.stdout
    assert ("scontrol requeue 7" in done.stdout) == requeued


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


def cores_of(document: dict) -> str:
    template = document["spec"]["template"] if document["kind"] == "Deployment" else None
    pod = template or document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    resources = pod["spec"]["containers"][0]["resources"]
    assert "cpu" not in resources.get("limits", {}), "a limit would throttle the pod on an idle machine"
    return resources["requests"]["cpu"]


def test_jobset_requests_the_cores_of_the_roles_that_the_plan_places_on_a_node() -> None:
    """base on one node of 8 GPUs: 4 servers of 1 + 2 processes, 4 trainer ranks, an actor with 3 workers, a
    preprocessor, a verifier with 2 workers and redis. With 2 GPUs to a server 2 servers have 2 + 2 processes."""
    arguments = ("--config-name=base", "output_dir=/r", "actor.rollout_workers=3")
    split = ("world.actor_fraction=4", "world.preprocessor_fraction=0", "world.finetune_fraction=4")
    (gang,) = yaml.safe_load_all(
        TARGETS["jobset"](deployment(arguments=(*arguments, *split), nodes=1, gpus_per_node=8))
    )
    assert cores_of(gang) == str(4 * 3 + 4 + 4 + 1 + 3 + 1)
    wide = (*arguments, *split, "vllm_config.vllm_kwargs.tensor-parallel-size=2")
    documents = yaml.safe_load_all(
        TARGETS["jobset"](deployment(arguments=wide, nodes=1, gpus_per_node=8, extra_servers=1))
    )
    assert [cores_of(each) for each in documents] == [str(2 * 4 + 4 + 4 + 1 + 3 + 1), str(8 + 2)]


def test_cores_that_are_named_are_taken_and_a_node_without_gpus_gets_eight() -> None:
    (gang,) = yaml.safe_load_all(TARGETS["jobset"](deployment(gpus_per_node=8, cpus_per_node=64)))
    assert cores_of(gang) == "64"
    (gang,) = yaml.safe_load_all(TARGETS["jobset"](deployment()))
    assert cores_of(gang) == "8"
    assert "#SBATCH --cpus-per-task=64\n" in TARGETS["slurm"](deployment(gpus_per_node=8, cpus_per_node=64))
    assert "#SBATCH --cpus-per-task=8\n" in TARGETS["slurm"](deployment())


def test_configuration_that_cannot_be_planned_is_refused_when_rendered(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base\n")
    arguments = (f"--config-dir={tmp_path}", "--config-name=mine", "output_dir=/r")
    with pytest.raises(ConfigError, match=says("mine.yaml", "not valid YAML")):
        TARGETS["jobset"](deployment(arguments=arguments, gpus_per_node=8))
    with pytest.raises(ConfigError, match=says("'bas'", "base")):
        TARGETS["jobset"](deployment(arguments=("--config-name=bas", "output_dir=/r"), gpus_per_node=8))
    with pytest.raises(ConfigError, match=says("actor.nothing", "not a configuration key")):
        TARGETS["jobset"](deployment(arguments=("output_dir=/r", "actor.nothing=1"), gpus_per_node=8))


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


def test_what_cannot_be_rendered_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="output_dir=… is missing"):
        main(["--target", "slurm", "--", "--config-name=base"])
    with pytest.raises(ConfigError, match="--name 'My Run'"):
        main(["--target", "slurm", "--name", "My Run", "--", "output_dir=x"])
    with pytest.raises(ConfigError, match="--image is missing"):
        main(["--target", "jobset", "--", "output_dir=x"])
    assert main(["--target", "slurm", "--", "--config-name=base", "output_dir=/x"]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH")


@pytest.mark.parametrize("argument", ["force_restart=True", "++force_restart=True", "resume=checkpoint", "a file"])
def test_what_is_for_one_launch_is_refused_in_a_command_line_that_is_repeated(argument: str, tmp_path: Path) -> None:
    """A requeued job, or a job set that is started again, deleted the run that it should have gone on with."""
    arguments = (*ARGUMENTS, argument)
    if argument == "a file":
        (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nforce_restart: true\n")
        arguments = ("--config-dir", str(tmp_path), "--config-name=mine", *ARGUMENTS[1:])
    said = "resume=checkpoint" if argument.startswith("resume") else "force_restart=true"
    with pytest.raises(ConfigError, match=says(said, "again", "leave it out")):
        deployment(arguments=arguments)


@pytest.mark.parametrize(
    "only_there", [("--config-dir=/of/the/image", "--config-name=mine"), ("seed=${oc.env:NOT_HERE}",)]
)
def test_configuration_that_only_the_machines_have_is_rendered_where_it_is_not_needed(
    only_there: tuple[str, ...],
) -> None:
    arguments = (*only_there, "output_dir=/results/x")
    assert "output_dir=/results/x" in TARGETS["jobset"](deployment(arguments=arguments, cpus_per_node=64))
    with pytest.raises(ConfigError, match=r"mine|NOT_HERE"):  # the cores are those of the plan
        deployment(arguments=arguments, gpus_per_node=8)
    with pytest.raises(ConfigError, match=r"force_restart=true is for one launch"):
        deployment(arguments=(*arguments, "force_restart=true"), cpus_per_node=64)
