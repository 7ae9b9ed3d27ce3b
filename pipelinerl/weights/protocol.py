"""Messages between trainer and server about one weight update. Imports msgspec only.

One update is one ``POST /receive_weight_update``: a `WeightUpdateRequest`, answered by a `WeightUpdateAnswer`.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from pipelinerl.config.backends import TransportName

PATH = "/receive_weight_update"
INFO_PATH = "/weight_info"
CHECK_PATH = "/check_weights"
OWN_LINK = "own link too slow"
"""Marks the error of a server whose last source had more bytes than came."""
HELD_UP = "held up"
"""Marks the error of a server whose last source had no more bytes itself."""
STALE = "stale"
"""Marks the error of a server that no longer holds a delta's base version (after a restart, or another sender)."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool")

Size = Annotated[int, Meta(ge=0, le=2**48)]
Positive = Annotated[int, Meta(ge=1, le=2**48)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
HostName = Annotated[str, Meta(min_length=1, max_length=255)]


class ParamSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter of an update: name in the checkpoint, dtype on the wire, full shape."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address at which a trainer rank or a server's worker serves bytes."""

    host: HostName
    port: Port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file in the store of weights (`weights.backend=store`)."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    num_bytes: Size

    def __str__(self) -> str:
        return self.name


class Runs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``count`` runs of ``length`` bytes of a version, which lie one after the other in a worker's shard."""

    place: Size
    """Byte of the shard at which they begin."""
    first: Size
    """Byte of the version at which the first run begins."""
    length: Positive
    stride: Positive
    """Bytes of the version from the beginning of a run to the next, ``length`` or more."""
    count: Positive

    @property
    def num_bytes(self) -> int:
        return self.count * self.length

    @property
    def end(self) -> int:
        """End of the last run in the version."""
        return self.first + (self.count - 1) * self.stride + self.length


class PayloadRange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A byte range of the payload, and its sources."""

    start: Size
    end: Size
    sources: Annotated[tuple[Address, ...], Meta(max_length=64)] = ()
    """Nearest first, the trainer last. A worker leaves a source that fails or stalls for the next one."""
    file: StoredFile | None = None
    """The last source, where the trainer writes to a store."""

    def __post_init__(self) -> None:
        if not self.sources and self.file is None:
            raise ValueError("a range needs sources or a file")
        if self.file is not None and self.file.num_bytes != self.end - self.start:
            raise ValueError(f"a range of {self.end - self.start} bytes has a file of {self.file.num_bytes}")

    @property
    def all_sources(self) -> "tuple[Address | StoredFile, ...]":
        sources: list[Address | StoredFile] = list(self.sources)
        return tuple(sources if self.file is None else [*sources, self.file])


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update of one server."""

    sender: Annotated[str, Meta(min_length=1, max_length=64)]
    """Name of the trainer process, which keeps versions of different processes apart."""
    version: Annotated[int, Meta(ge=0, le=2**53)]
    """Number of optimizer steps that made these weights."""
    params: Annotated[tuple[ParamSpec, ...], Meta(min_length=1, max_length=1_000_000)]
    workers: Annotated[tuple[tuple[PayloadRange, ...], ...], Meta(min_length=1, max_length=4096)]
    """The ranges that each worker of the server pulls. Those of a worker make up the payload."""
    transport: TransportName = msgspec.field(name="carriage")
    """Transport between two workers: in the connection, through NCCL, or as handles of one GPU's memory."""
    bucket_bytes: Annotated[int, Meta(ge=64, le=2**40)]
    """Bytes that a worker collects before it forwards them."""
    timeout_s: Seconds
    """Time from the request's arrival until all bytes must be received."""
    stall_s: Seconds
    """A worker leaves a source that has sent no byte for this long."""
    base_version: int | None = None
    """Delta mode: the bytes encode the changes since this version, which the server must hold. None = dense."""
    store: Annotated[str, Meta(max_length=4096)] = ""
    """Folder or URL of the parts' files. Empty = they have none."""
    is_last: bool = True
    """False = another request of the same update follows at once, so these weights are staged and not prepared."""

    @property
    def whole_key(self) -> str:
        """Key of this version's bytes on a buffer registry."""
        return f"{self.sender}/{self.version}"

    @property
    def payload_key(self) -> str:
        """Key of the bytes that are sent."""
        return payload_key(self.sender, self.version, self.base_version)


def payload_key(sender: str, version: int, base_version: int | None) -> str:
    """Returns the key of a version's bytes, or of its difference from ``base_version``."""
    return f"{sender}/{version}" if base_version is None else f"{sender}/{version}-{base_version}"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker saw of one source of one part."""

    source: Address
    transport: TransportName
    num_bytes: Size
    """Bytes of the part that came from this source."""
    part_bytes: Size
    """Length of the part."""
    seconds: float
    """From the question to the last byte."""
    ahead_s: float
    """Seconds of these in which the source was two buckets ahead, so that the link was the limit."""


class WeightUpdateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The version is live."""

    version: int
    pause_ms: float
    """Decoding stall: time in which the engine begins no step, measured in the engine."""
    swap_ms: float
    """Part of the pause in which the weights change. The rest waits for steps under way."""
    transfer_ms: float
    """Time from the request's arrival until all bytes were received."""
    prepare_ms: float
    """Background work between the last byte and the pause."""
    staged_bytes: Size = 0
    """Largest staging buffer of a worker: the version, or the worker's shard of it."""
    links: tuple[Link, ...] = ()
    """The links over which the bytes came, of all workers."""


class WeightUpdateFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Body of any other answer: the old weights are live."""

    error: str
    links: tuple[Link, ...] = ()
    """Links over which bytes came, of the workers that failed."""


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /weight_info``."""

    weight_version: str
    """vLLM's label of sampled tokens: optimizer steps as a decimal number, or "default" before the first update."""
    workers: tuple[Address, ...] = ()
    """Addresses at which this server's workers give and take weights."""
    serving: str = ""
    """`WeightUpdateRequest.whole_key` of the live weights. Empty before the first update."""
    reading: str = ""
    """Key of the version that the server is fetching from the store, whose files must stay. Empty = none."""


class WeightCheckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /check_weights``: compare the live tensors with the bytes that were sent."""

    version: Annotated[int, Meta(ge=0, le=2**53)]


class WeightCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a `WeightCheckRequest`, from a server or from one of its workers."""

    is_checked: bool
    """False = the bytes of this version are no longer there, because a newer version is arriving."""
    checksum: str = ""
    """`pipelinerl.weights.transfer.checksum.checksum` of the received bytes. Empty = the worker keeps a shard,
    which it has compared with the trainer's bytes itself."""
    differing: tuple[str, ...] = ()
    """Live parameters that differ from the received ones."""
    unlearned: tuple[str, ...] = ()
    """Live parameters that could not be compared."""
    check_ms: float = 0.0
    base: str = ""
    """`pipelinerl.weights.base_files.base_digest` of the model's files, where updates bring an adapter of it."""


# Between two processes that hold weights, in frames of a `wire.Connection`.


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Asks for bytes of a payload, or of one shard of it, as they become available."""

    key: str
    start: Size
    end: Size
    shard: str = ""
    """Name of the shard, whose bytes ``start`` … ``end`` are meant. Empty = the payload's bytes."""
    runs: tuple[Runs, ...] = ()
    """Where they lie in the payload, for a source that has all of it."""
    bucket_bytes: Positive
    transport: TransportName = msgspec.field(name="carriage")
    beat_s: Seconds
    """Longest time between two signs of life."""
    group: str = ""
    """Name of the NCCL group over which the buckets go. Empty = they do not go over NCCL."""
    member: Size = 0
    """The puller's rank in it."""


class JoinGroup(msgspec.Struct, frozen=True, kw_only=True, tag="join"):
    """From the trainer's rank 0 to a rank or worker: become a member of an NCCL group until this connection ends."""

    name: str
    sender: str
    """Name of the trainer process. Groups of another one end."""
    unique_id: Annotated[str, Meta(min_length=256, max_length=256)]
    """NCCL's 128 bytes, in hexadecimal digits."""
    members: Annotated[tuple[Address, ...], Meta(min_length=2, max_length=65_536)]
    """By their rank in the group. The first ``num_sources`` give bytes to the others."""
    num_sources: Positive
    rank: Size
    timeout_s: Seconds
    """The group fails if not all members have joined by then."""


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """Answer to `JoinGroup`: all members have joined."""


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Sent between the bytes of a `Get`, and instead of them while the source has none."""

    end: Size
    """End of the bytes that the source has without a gap."""


class Sum(msgspec.Struct, frozen=True, kw_only=True, tag="sum"):
    """From a server's worker to a trainer rank: the checksum of these runs of a version, counted from the first one."""

    key: str
    runs: tuple[Runs, ...]


class Summed(msgspec.Struct, frozen=True, kw_only=True, tag="summed"):
    """Answer to `Sum`. Empty = the version is no longer here."""

    checksum: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """From the trainer's rank 0 to another rank: describe your stripe of this version."""

    version: Annotated[int, Meta(ge=0, le=2**53)]


class Description(msgspec.Struct, frozen=True, kw_only=True, tag="description"):
    """Answer to `Describe`."""

    checksum: str
    """`pipelinerl.weights.transfer.checksum.checksum` of the stripe, at its place."""
    delta_bytes: Size | None
    """Length of the stripe's difference from the previous version. None = there is none, or it is not smaller."""
    encode_s: float
    """Seconds that its encoding took."""


class Write(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    """From the trainer's rank 0 to another rank: write your stripe of this version to the store."""

    version: Annotated[int, Meta(ge=0, le=2**53)]
    prefix: Annotated[str, Meta(max_length=64)]
    """Beginning of the file's name."""
    is_delta: bool
    """Write its difference from the previous version."""


class Written(msgspec.Struct, frozen=True, kw_only=True, tag="written"):
    """Answer to `Write`: the file is complete and durable."""

    file: StoredFile


class PullUpdate(msgspec.Struct, frozen=True, kw_only=True, tag="take"):
    """From a server to its own worker: pull this update and answer when it is staged."""

    request: WeightUpdateRequest


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """Answer to `PullUpdate`: all bytes are received and prepared."""

    transfer_ms: float
    prepare_ms: float
    staged_bytes: Size = 0
    links: tuple[Link, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Answer to `PullUpdate`, `Describe` or `Write`: it failed."""

    error: str
    links: tuple[Link, ...] = ()
    """`PullUpdate`: the links over which bytes came."""


Order = Describe | Sum | Write | PullUpdate
Question = Get | JoinGroup | Order


class Averaging(NamedTuple):
    """How the workers of a teacher average the policy's versions (`pipelinerl.weights.load.average`)."""

    decay: float
    """β."""
    folder: str
    """Folder of the files, shared by the server's workers."""
    every: int
    """Versions from one file to the next."""
    kept: int
    """Number of files kept for each worker."""
