"""Kubernetes: a JobSet for the nodes of a run, and additional servers, which join by lease.

Every pod of the JobSet runs a launcher, whose rank is the pod's index. Servers of one node are a Deployment, servers of
several a LeaderWorkerSet, whose controller starts all pods of a server again when one ends. The secret and the
variables of the configuration come from a Kubernetes Secret with the run's name, which is not in the document.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import yaml

from pipelinerl.errors import ConfigError
from pipelinerl.launcher.render.deployment import Deployment, server_cores
from pipelinerl.streams.spec import run_key

JOB = "nodes"
REDIS_PORT = 15000
"""Below the ports that Linux gives to outgoing connections, as all ports of a run."""
MEET_PORT = 15100
"""Where the workers of a server on several nodes meet, on its first pod."""
MAX_RESTARTS = 10
"""Restarts of all pods: enough for lost nodes. JobSet also restarts a failed run, which ends soon again."""
RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def render(deployment: Deployment) -> str:
    """Return the documents for `kubectl apply -f -`.

    Raises:
        ConfigError: the image is missing, or servers shall join and `output_dir` is not absolute.
    """
    if not deployment.image:
        raise ConfigError("--image is missing: name the container's image")
    documents = [gang(deployment)]
    if deployment.extra_servers:
        documents.append((servers if deployment.nodes_per_server == 1 else wide_servers)(deployment))
    return yaml.safe_dump_all(documents, sort_keys=False, width=200)


def hosts_of(deployment: Deployment) -> list[str]:
    """Names of the JobSet's pods, which its headless service resolves."""
    return [f"{deployment.name}-{JOB}-0-{index}.{deployment.name}" for index in range(deployment.nodes)]


def gang(deployment: Deployment) -> dict[str, Any]:
    arguments = [
        *deployment.arguments,
        "streams=redis",
        f"streams.port={REDIS_PORT}",
        f"world.run_id={deployment.name}",
    ]
    environment: list[dict[str, Any]] = [
        {"name": "WORLD_SIZE", "value": str(deployment.nodes)},
        {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": RANK_FIELD}}},
        {"name": "PIPELINERL_HOSTS", "value": ",".join(hosts_of(deployment))},
    ]
    if deployment.nodes == 1:  # one named node listens beyond itself, so that servers can join
        arguments.append(f"world.hosts=[{hosts_of(deployment)[0]}]")
    cores = replace(deployment, arguments=tuple(arguments)).cores
    pod = pod_of(deployment, ["-m", "pipelinerl.launch", *arguments], environment, cores)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": deployment.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": deployment.name},
            "failurePolicy": {"maxRestarts": MAX_RESTARTS},
            "replicatedJobs": [
                {
                    "name": JOB,
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "completions": deployment.nodes,
                            "parallelism": deployment.nodes,
                            "completionMode": "Indexed",
                            "backoffLimit": 0,
                            "activeDeadlineSeconds": 3600 * deployment.hours,
                            "template": {"spec": {**pod, "restartPolicy": "Never"}},
                        }
                    },
                }
            ],
        },
    }


def servers(deployment: Deployment) -> dict[str, Any]:
    """Servers of one pod each."""
    name, labels = servers_of(deployment)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": deployment.extra_servers,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": server_pod(deployment)},
        },
    }


def wide_servers(deployment: Deployment) -> dict[str, Any]:
    """Servers of several pods each. Kubernetes puts the variables of LeaderWorkerSet into the command."""
    name, labels = servers_of(deployment)
    meet = ["--nodes", "$(LWS_GROUP_SIZE)", "--node", "$(LWS_WORKER_INDEX)"]
    pod = server_pod(deployment, [*meet, "--meet", f"$(LWS_LEADER_ADDRESS):{MEET_PORT}"])
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": deployment.extra_servers,
            "leaderWorkerTemplate": {
                "size": deployment.nodes_per_server,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    }


def servers_of(deployment: Deployment) -> tuple[str, dict[str, str]]:
    """Name and labels of the additional servers."""
    name = f"{deployment.name}-servers"
    return name, {"app": name}


def server_pod(deployment: Deployment, more: Sequence[str] = ()) -> dict[str, Any]:
    if not deployment.run_folder.startswith("/"):
        raise ConfigError(f"output_dir={deployment.run_folder}: pods find the run by it, so it must begin with /")
    address = f"redis://{hosts_of(deployment)[0]}:{REDIS_PORT}/{run_key(deployment.run_folder, deployment.name)}"
    command = ["-m", "pipelinerl.inference", "--run", address, "--run-dir", "/tmp/run", "--job", "actor_llm"]
    environment = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    cores = server_cores(deployment.gpus_per_node) if deployment.gpus_per_node else deployment.cores
    return pod_of(deployment, [*command, "--host", "$(POD_IP)", *more], environment, cores)


def pod_of(deployment: Deployment, command: list[str], environment: list[dict[str, Any]], cores: int) -> dict[str, Any]:
    """Return a pod that is placed where these cores are free. It may use others that are idle."""
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": deployment.name, "key": name, "optional": True}}}
        for name in deployment.variables
    ]
    secret = {"secretKeyRef": {"name": deployment.name, "key": "secret"}}
    resources = {"requests": {"cpu": str(cores)}}
    if deployment.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(deployment.gpus_per_node)}
    container = {
        "name": "pipelinerl",
        "image": deployment.image,
        "command": [deployment.python, *command],
        "workingDir": deployment.workdir,
        "env": [{"name": "PIPELINERL_SECRET", "valueFrom": secret}, *secrets, *environment],
        "resources": resources,
        "volumeMounts": [{"name": "results", "mountPath": "/results"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes = [
        {"name": "results", "persistentVolumeClaim": {"claimName": f"{deployment.name}-results"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [container], "volumes": volumes}
