"""Rendered documents against the schemas of those who read them: JobSet's own models, and Kubernetes' for the rest."""

from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from pipelinerl.render.deployment import Deployment
from pipelinerl.render.jobset import render
from tests.leader_worker_set import LeaderWorkerSet


def documents(**fields: Any) -> list[dict[str, Any]]:
    arguments = ("--config-name=base", "output_dir=/results/base")
    settings = {"arguments": arguments, "nodes": 2, "image": "registry/prl:1", "extra_servers": 2} | fields
    return list(yaml.safe_load_all(render(Deployment(**settings))))


@pytest.mark.parametrize("gpus", [0, 8])
def test_jobset_s_models_take_every_field(gpus: int) -> None:
    gang, _ = documents(gpus_per_node=gpus)
    read = JobsetV1alpha2JobSet.from_dict(gang)
    assert read is not None
    assert read.to_dict() == gang  # a field that the models do not know would be missing


@pytest.mark.parametrize("gpus", [0, 8])
def test_kubernetes_takes_the_gang_s_job_and_the_deployment(gpus: int) -> None:
    gang, servers = documents(gpus_per_node=gpus)
    template = gang["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "gang"}, "spec": template["spec"]}
    version = kubernetes_validate.latest_version()
    for document in (job, servers):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("gpus", [0, 8])
def test_leader_worker_set_has_known_fields_and_a_pod_of_kubernetes(gpus: int) -> None:
    _, servers = documents(gpus_per_node=gpus, nodes_per_server=2)
    read = LeaderWorkerSet.model_validate(servers)
    assert (read.spec.replicas, read.spec.leaderWorkerTemplate.size) == (2, 2)
    template = servers["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    servers["spec"]["leaderWorkerTemplate"]["replicas"] = 2
    with pytest.raises(ValidationError, match="replicas"):
        LeaderWorkerSet.model_validate(servers)


def test_an_unknown_field_is_seen() -> None:
    gang, servers = documents()
    gang["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volume"] = []
    read = JobsetV1alpha2JobSet.from_dict(gang)
    assert read is not None
    assert read.to_dict() != gang
    servers["spec"]["template"]["spec"]["volume"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(servers, kubernetes_validate.latest_version(), strict=True)
