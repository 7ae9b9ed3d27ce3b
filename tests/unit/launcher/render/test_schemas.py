"""Rendered documents against the schemas of those who read them: JobSet's own, and Kubernetes' for the rest.

`jobset_crd.json` is the schema of the resource that the JobSet project publishes, under the Apache License 2.0.
"""

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from pydantic import ValidationError

from pipelinerl.launcher.render.deployment import Deployment
from pipelinerl.launcher.render.jobset import render
from tests.leader_worker_set import LeaderWorkerSet

CRD = Path(__file__).with_name("jobset_crd.json")


def strict(schema: Any) -> Any:
    """The schema as an API server reads it with strict validation: a field that it does not name is refused."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema["properties"]:
        closed.setdefault("additionalProperties", False)
    return closed


def published_schema() -> dict[str, Any]:
    schema = json.loads(CRD.read_text())["schema"]
    schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}  # Kubernetes' own
    return strict(schema)


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


@pytest.mark.parametrize("gpus", [0, 8])
def test_jobset_fits_the_published_resource(gpus: int) -> None:
    gang, _ = documents(gpus_per_node=gpus)
    jsonschema.Draft202012Validator(published_schema()).validate(gang)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "failurePolicy", "maxRestarts"), "ten"),
        (("spec", "network", "enableDnsHostnames"), True),
        (("spec", "replicatedJobs", 0, "replica"), 1),
        (("spec", "replicatedJobs", 0, "template", "spec", "completionModes"), "Indexed"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "resource"), {}),
    ],
)
def test_jobset_with_a_wrong_field_does_not_fit(path: tuple[str | int, ...], value: Any) -> None:
    gang, _ = documents()
    changed: Any = (document := copy.deepcopy(gang))
    for key in path[:-1]:
        changed = changed[key]
    changed[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(published_schema()).validate(document)
