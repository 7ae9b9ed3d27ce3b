"""What the actor and its workers tell each other, as msgpack over a pipe. Frozen; no pickle."""

from typing import Any

import msgspec

from pipelinerl.records import Rollout


class Servers(msgspec.Struct, frozen=True, kw_only=True, tag="servers"):
    """The servers in service and the version that they hold. Requests on any other server are moved at once."""

    version: int
    urls: dict[str, str]
    """Job name → URL."""


class StartGroup(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Roll out one problem."""

    ticket: int
    """The actor's number of this piece of work; the answer carries it."""
    group_id: str
    domain: int
    """Index of the domain in the run."""
    problem: dict[str, Any]
    attempts: tuple[int, ...]
    evaluation: bool
    version: int
    """Live version at dispatch: the oldest that a token can have."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Give this work up; no answer is expected."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End now."""


ToWorker = Servers | StartGroup | Cancel | Stop


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without a result: never a reward."""

    attempt: int
    reason: str
    """One of ``failures.REASONS``."""
    detail: str
    latency_s: float = 0.0


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """One attempt of the work has ended while others go on: its place is free."""

    ticket: int


class GroupFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Every attempt of a ``StartGroup`` has come to an end."""

    ticket: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]
    aborted_requests: int = 0
    """Requests that ended without a completion, repeated or not."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has imported the domain and takes work."""


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """The worker's process runs, whatever its rollouts do."""


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot go on."""

    error: str


FromWorker = AttemptEnded | Beat | GroupFinished | Ready | WorkerFailed
