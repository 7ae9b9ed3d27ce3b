"""The rendered JobSet and its servers as processes that have nothing but what is rendered: the quickstart learns.

Each pod is a node with a network and a file system of its own. They share no folder: the pod of the server that joins
has only a copy of the model. Topics travel through Redis, weights over TCP from the trainer to every server, or through
a bucket of S3's protocol, whose variables are added to the documents as a user would add them.
"""

import contextlib
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.jobset import RANK_FIELD, hosts_of, render
from tests.namespaces import Nodes, are_possible, two_nodes
from tests.pods import Machine, start_pod
from tests.sender_kit import wait_for

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 1200
S3_PORT = 15900
THROUGH_STORE = ("weights.backend=store", "weights.store=s3://weights/run", "weights.delta=true")
RUN = Path("run")
"""The run folder in the results volume."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * RUN_TIMEOUT_S),
    pytest.mark.skipif(not are_possible() or not shutil.which("unshare"), reason="namespaces need root, ip, unshare"),
    pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server"),
]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture
def volumes() -> Iterator[tuple[Path, Path]]:
    """The results volumes of the two pods, outside /tmp, which every pod has for itself."""
    with tempfile.TemporaryDirectory(prefix="prl-pods-", dir="/var/tmp") as folder:
        paths = (Path(folder) / "gang", Path(folder) / "server")
        for path in paths:
            path.mkdir()
        yield paths


@contextlib.contextmanager
def bucket(nodes: Nodes, log: Path) -> Iterator[dict[str, str]]:
    """moto on the first node. Yields the variables with which the bucket `weights` is found."""
    endpoint = f"http://{nodes.addresses[0]}:{S3_PORT}"
    inside = ["ip", "netns", "exec", nodes.names[0], sys.executable]
    with log.open("w") as output:
        server = subprocess.Popen(
            [*inside, "-m", "moto.server", "-H", nodes.addresses[0], "-p", str(S3_PORT)], stdout=output, stderr=output
        )
    try:
        wait_for(lambda: "Running on http://" in log.read_text(), 60)
        subprocess.run([*inside, "-c", f"import httpx; httpx.put('{endpoint}/weights').raise_for_status()"], check=True)
        yield {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
    finally:
        server.kill()
        server.wait()


def deployment_of_quickstart(store: bool) -> Deployment:
    arguments = ("--config-name=quickstart", f"output_dir=/results/{RUN}", "wandb.mode=disabled")
    return Deployment(
        arguments=(*arguments, "finetune.max_train_steps=240", *(THROUGH_STORE if store else ())),
        name="quick",
        image="registry/prl:1",
        python=sys.executable,
        workdir=str(ROOT),
        extra_servers=1,
    )


def until_trained(volume: Path, steps: int, gang: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline, path = time.monotonic() + RUN_TIMEOUT_S, volume / RUN / "metrics" / "finetune.jsonl"
    while not path.exists() or len(path.read_bytes().splitlines()) < steps:
        assert gang.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)


def run_pods(pods: list[dict], machines: list[Machine], volumes: tuple[Path, Path], logs: list[Path]) -> None:
    """Run the gang to its end. The server's pod comes after two steps."""
    started = [start_pod(pods[0], machines[0], logs[0])]
    try:
        until_trained(volumes[0], 2, started[0], logs[0])
        shutil.copytree(volumes[0] / RUN / "model", volumes[1] / RUN / "model")
        started.append(start_pod(pods[1], machines[1], logs[1]))
        assert started[0].wait(RUN_TIMEOUT_S) == 0, logs[0].read_text()[-4000:] + logs[1].read_text()[-2000:]
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(120)


@pytest.mark.parametrize("store", [False, True], ids=["pushed", "store"])
def test_quickstart_learns_with_a_server_that_joins_late_without_a_common_folder(
    volumes: tuple[Path, Path], nodes: Nodes, tmp_path: Path, store: bool
) -> None:
    deployment = deployment_of_quickstart(store)
    gang, servers = yaml.safe_load_all(render(deployment))
    pods = [
        gang["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
        servers["spec"]["template"]["spec"],
    ]
    machines = [
        Machine(
            network=nodes.names[index],
            hosts=dict.fromkeys(hosts_of(deployment), nodes.addresses[0]),
            claims={"quick-results": volumes[index]},
            secrets={"secret": token},
            fields={RANK_FIELD: "0", "status.podIP": nodes.addresses[index]},
        )
        for token in [secrets.token_hex(16)]
        for index in range(2)
    ]
    logs = [tmp_path / f"pod{index}.txt" for index in range(2)]
    with contextlib.ExitStack() as held:
        if store:
            variables = held.enter_context(bucket(nodes, tmp_path / "moto.log"))
            for pod in pods:
                pod["containers"][0]["env"] += [{"name": name, "value": value} for name, value in variables.items()]
        run_pods(pods, machines, volumes, logs)
    run_dir = volumes[0] / RUN
    summary = json.loads((run_dir / "summary.json").read_text())
    print(f"success {summary['success_before']:.3f} to {summary['success_after']:.3f}")
    assert summary["success_after"] >= 0.8
    assert read_ledger(run_dir).violations == ()
    log = (run_dir / "finetune_0" / "log.txt").read_text()
    assert f"member_came name=actor_llm_1 url=http://{nodes.addresses[1]}:" in log
    print([line for line in log.splitlines() if "actor_llm_1" in line][:5])
    if store:
        assert logs[1].read_text().count("event=version_fetched") > 5
    assert [path.name for path in volumes[1].rglob("*") if path.is_file() and path.parent.name != "model"] == []
