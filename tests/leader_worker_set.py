"""Models of the fields of a LeaderWorkerSet that the project renders, after its API (leaderworkerset.x-k8s.io/v1).

A field that is not here is an error. Pods are checked by Kubernetes' own schemas.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(_Model):
    """Name and labels of an object or of a pod, whose name its controller gives."""

    name: str | None = Field(None, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)
    labels: dict[str, str] = {}


class PodTemplate(_Model):
    """A pod as Kubernetes has it."""

    metadata: Metadata
    spec: dict[str, Any]


class LeaderWorkerTemplate(_Model):
    """The pods of one group. Without a template of its own the leader has that of the workers."""

    size: int = Field(ge=1)
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
    workerTemplate: PodTemplate


class Spec(_Model):
    """Groups, and the pods of each."""

    replicas: int = Field(ge=0)
    leaderWorkerTemplate: LeaderWorkerTemplate


class LeaderWorkerSet(_Model):
    """The document."""

    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: Spec
