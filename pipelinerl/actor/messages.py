"""The messages between the actor and its workers, sent as msgpack over a ``connection``. Frozen, never pickled.

Each rollout is sent in a message of its own as soon as it ends, so no message is larger than one rollout.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from pipelinerl.records import Rollout
from pipelinerl.records.drops import DropReason


class Servers(msgspec.Struct, frozen=True, kw_only=True, tag="servers"):
    """The servers in service. Requests on any other server are moved at once."""

    version: int
    """Newest version that one of them serves."""
    urls: dict[str, str]
    """Job name → URL."""
    serving: dict[str, int]
    """Job name → version that it serves."""
    draining: tuple[str, ...] = ()
    """Names of the servers in service that accept no new request."""
    capacities: dict[str, int] = {}
    """Job name → rollouts at a time that the server takes. A server that is not here takes the configured number."""
    probes_missed: dict[str, int] = {}
    """Job name → weight probes that it has missed. A server that is not here has missed none."""


class StartGroup(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Roll out one problem."""

    task_id: int = 0
    """The actor's number for this piece of work. Replies carry it."""
    group_id: str
    domain: int
    """Index of the domain in the run."""
    problem: dict[str, Any]
    attempts: tuple[int, ...]
    evaluation: bool
    version: int
    """Live version at dispatch. No token that is sampled from then on has an older one."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag="cancel"):
    """Cancel this work. The worker sends no reply."""

    task_id: int


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """End the process now."""


ToWorker = Servers | StartGroup | Cancel | Stop


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without a result. It never becomes a reward."""

    attempt: int
    reason: DropReason
    detail: str
    latency_s: float = 0.0
    server: str = ""
    """Server that missed the weight probe for this attempt's tokens (reason `weights`)."""


class RolloutDone(msgspec.Struct, frozen=True, kw_only=True, tag="rollout"):
    """One attempt has ended with a rollout, which makes room for another."""

    task_id: int
    rollout: Rollout


class RolloutFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failure"):
    """One attempt has ended without a rollout, which makes room for another."""

    task_id: int
    failure: Failure


class GroupEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """Every attempt of a ``StartGroup`` has been reported."""

    task_id: int
    aborted_requests: int = 0
    """Requests that ended without a completion, repeated or not."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """What a domain has done to the event loop of its worker."""

    seconds: float
    """For which it has blocked it."""
    where: str
    """`FILE:LINE in FUNCTION` of its code that did so last."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, tag="sampling"):
    """What servers have sampled for this worker so far. Sent when it has changed, at most once a second."""

    tokens: int
    """Since the worker began, of answers under way too."""
    longest: int
    """Tokens of the longest answer under way."""
    ended: int
    """Attempts at training problems that have ended since the worker began."""
    blocked: dict[str, Blocked] = {}
    """Domains that have blocked the worker's event loop."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker has imported the domain and accepts work."""


class WorkerFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The worker cannot continue."""

    error: str


FromWorker = RolloutDone | RolloutFailed | GroupEnded | Sampling | Ready | WorkerFailed


@dataclass(frozen=True, kw_only=True)
class GroupFinished:
    """All outcomes of a ``StartGroup``."""

    task_id: int
    rollouts: tuple[Rollout, ...]
    failures: tuple[Failure, ...]
    aborted_requests: int = 0
