"""The messages between the actor and its workers, sent as msgpack over a ``connection``: one per rollout that ends."""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pipelinerl.chat.images import describe_size
from pipelinerl.errors import DomainError, StreamError
from pipelinerl.records import Rollout
from pipelinerl.records.drops import DropReason
from pipelinerl.streams.codec import Codec

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE = "pipelinerl_picture"
"""Key of a mapping that stands for an image on its way."""
JUDGEMENT = -1
"""In place of an attempt's number: the judgement of the whole group by its domain's `judge_group`."""
QUICK = 1
"""Compression level: the file lives for one message."""
FORMATS = dict.fromkeys(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "PNG") | dict.fromkeys(
    ("CMYK", "F", "I", "LAB", "PA"), "TIFF"
)
"""Format that keeps the pixels of PIL's mode."""


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
    """An attempt without a result, or a group without a judgement. It never becomes a reward."""

    attempt: int
    """Or ``JUDGEMENT``."""
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
    rewards: dict[int, float] | None = None
    """By attempt, from the domain's `judge_group`. Empty: it was not judged. None: each rollout has its own."""
    failure: Failure | None = None
    """Why the judgement failed. None: it did not, or an attempt failed before it."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """What a domain has done to the event loop of its worker."""

    seconds: float
    """For which it has blocked it."""
    where: str
    """`FILE:LINE in FUNCTION` of its code that did so last."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, tag="sampling"):
    """What servers have sampled for this worker so far, and how busy it is. Sent at changes, at most once a second."""

    tokens: int
    """Since the worker began, of answers under way too."""
    longest: int
    """Tokens of the longest answer under way."""
    ended: int
    """Attempts at training problems that have ended since the worker began."""
    busy: float = 0.0
    """Share of the time since the previous report in which the worker computed, or code blocked its event loop."""
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
    judged: bool = False
    """Whether the domain judges whole groups."""

    @staticmethod
    def of(ended: GroupEnded, rollouts: Iterable[Rollout], failures: Iterable[Failure]) -> "GroupFinished":
        """Joins what a worker reported. Rollouts that wait for a judgement which there is not are left out."""
        rewards = ended.rewards
        if rewards is not None:
            rollouts = [_rewarded(rollout, rewards[rollout.attempt]) for rollout in rollouts if rewards]
        return GroupFinished(
            task_id=ended.task_id,
            rollouts=tuple(rollouts),
            failures=(*failures, *([ended.failure] if ended.failure else ())),
            aborted_requests=ended.aborted_requests,
            judged=rewards is not None,
        )


def _rewarded(rollout: Rollout, reward: float) -> Rollout:
    return msgspec.structs.replace(rollout, reward=reward, metrics=rollout.metrics | {"reward": reward})


TO_WORKER: Codec[ToWorker] = Codec(ToWorker)
FROM_WORKER: Codec[FromWorker] = Codec(FromWorker)


def encode_start(start: StartGroup) -> bytes:
    """Encodes the message. Raises ``DomainError`` if the problem holds values that are not plain data."""
    try:
        return TO_WORKER.encode(msgspec.structs.replace(start, problem=pack_pictures(start.problem)))
    except StreamError as error:
        keys = {key: type(value).__name__ for key, value in start.problem.items()}
        raise DomainError(
            f"a problem holds a value that cannot be sent to a worker ({error}); its fields: {keys}; "
            "problems must consist of strings, numbers, lists, dicts and numpy arrays"
        ) from error


def pack_pictures(problem: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the problem with PIL's images among its values, however deep, as files that keep every pixel.

    Raises:
        DomainError: an image cannot be read. It names the field.
    """
    return {name: _packed(value, str(name)) for name, value in problem.items()}


def unpack_pictures(problem: dict[str, Any]) -> dict[str, Any]:
    """Returns a problem with its images as PIL's again."""
    return {name: _unpacked(value) for name, value in problem.items()}


def describe_value(value: Any) -> str:
    """Returns text for a value that JSON does not have."""
    if _is_picture(value):
        return describe_size(value)
    return f"[{len(value)} bytes]" if isinstance(value, bytes) else str(value)


def _is_picture(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.") and hasattr(value, "save")


def _packed(value: Any, field: str) -> Any:
    if isinstance(value, list | tuple):
        return [_packed(item, field) for item in value]
    if isinstance(value, dict):
        return {name: _packed(item, f"{field}.{name}") for name, item in value.items()}
    return {PICTURE: _file_of(value, field)} if _is_picture(value) else value


def _file_of(picture: "Image", field: str) -> bytes:
    where = f"a problem's field `{field}` holds a {describe_size(picture)}"
    if picture.mode not in FORMATS:
        raise DomainError(f'{where} of mode {picture.mode}: give it as `image.convert("RGB")`')
    file = io.BytesIO()
    try:
        picture.save(file, FORMATS[picture.mode], compress_level=QUICK)
    except (OSError, SyntaxError, ValueError) as error:
        raise DomainError(f"{where} that cannot be read ({error}): mend it or leave the problem out") from error
    return file.getvalue()


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() != {PICTURE}:
        return {name: _unpacked(item) for name, item in value.items()}
    from PIL import Image

    return Image.open(io.BytesIO(value[PICTURE]))
