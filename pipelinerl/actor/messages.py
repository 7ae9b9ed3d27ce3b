"""What the actor and its workers tell each other, as msgpack over a ``connection``. Frozen; no pickle.

A rollout travels as soon as it has ended, by itself: no message is larger than one rollout.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from pipelinerl.records import Rollout


class Servers(msgspec.Struct, frozen=True, kw_only=True, tag="servers"):
    """The servers in service. Requests on any other server are moved at once."""

    version: int
    """Newest that one of them serves."""
    urls: dict[str, str]
    """Job name → URL."""
    serving: dict[str, int]
    """Job name → the version that it serves."""
    draining: tuple[str, ...] = ()
    """Those of them that take no new request."""
    missed: dict[str, int] = {}
    """Servers that have just missed their weight probe → the first version that they may not have used."""


class StartGroup(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Roll out one problem."""

    ticket: int = 0
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


class RolloutDone(msgspec.Struct, frozen=True, kw_only=True, tag="rollout"):
    """One attempt of the work has ended with a rollout: its place is free."""

    ticket: int
    rollout: Rollout


class RolloutFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """One attempt of the work has ended without a rollout: its place is free."""

    ticket: int
    failure: Failure


class GroupEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Every attempt of a ``StartGroup`` has been reported."""

    ticket: int
    aborted_requests: int = 0
    """Requests that ended without a completion, repeated or not."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has imported the domain and takes work."""


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot go on."""

    error: str


FromWorker = RolloutDone | RolloutFailed | GroupEnded | Ready | WorkerFailed


@dataclass(frozen=True, kw_only=True)
class GroupFinished:
    """All that came of a ``StartGroup``."""

    ticket: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]
    aborted_requests: int = 0
