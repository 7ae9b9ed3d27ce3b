"""What trainer and server tell each other about one weight update. Imports msgspec only.

One update is one ``POST /receive_weight_update``: the body is a `WeightUpdateRequest`, the bytes are pulled from the
sources that it names (`wire`), the answer is a `WeightUpdateAnswer` after the new weights are live.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PATH = "/receive_weight_update"
INFO_PATH = "/weight_info"
CHECK_PATH = "/check_weights"
STALE = "stale"
"""In a refusal's error: the server has lost (restart, another sender) the version that a delta starts from."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool")

Size = Annotated[int, Meta(ge=0, le=2**48)]
Positive = Annotated[int, Meta(ge=1, le=2**48)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
HostName = Annotated[str, Meta(min_length=1, max_length=255)]
Carriage = Literal["tcp", "nccl", "ipc"]


class ParamSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter as it travels: the checkpoint's name, the dtype on the wire, the full shape."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a trainer's rank or a server's worker listens for those who pull bytes."""

    host: HostName
    port: Port

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of the payload's bytes, and who has it."""

    start: Size
    end: Size
    sources: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=64)]
    """The nearest first, the trainer last. One that fails or stalls is left for the next."""


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update of one server."""

    sender: Annotated[str, Meta(min_length=1, max_length=64)]
    """Name of the trainer process: versions of two processes are never mixed up."""
    version: Annotated[int, Meta(ge=0, le=2**53)]
    """Optimizer steps behind these weights."""
    params: Annotated[tuple[ParamSpec, ...], Meta(min_length=1, max_length=1_000_000)]
    workers: Annotated[tuple[tuple[Part, ...], ...], Meta(min_length=1, max_length=4096)]
    """For each worker of the server the parts that it pulls; together they are the payload."""
    carriage: Carriage
    """How bytes travel between two workers: in the connection, through NCCL, or as handles of one GPU's memory."""
    bucket_bytes: Annotated[int, Meta(ge=64, le=2**40)]
    """Bytes that a worker waits for before it passes them on."""
    timeout_s: Seconds
    """From the request's arrival until all bytes are here."""
    stall_s: Seconds
    """A source that has not sent a byte for so long is left for the next one."""
    expected_s: Annotated[float, Meta(ge=0)] = 0.0
    """About how long a transfer of so many bytes takes; 0 = not known."""
    base_version: int | None = None
    """Delta mode: the bytes encode what changed since this version, which the server must hold. None = dense."""

    @property
    def whole_key(self) -> str:
        """Name of this version's bytes on a shelf."""
        return f"{self.sender}/{self.version}"

    @property
    def payload_key(self) -> str:
        """Name of the bytes that travel."""
        return payload_key(self.sender, self.version, self.base_version)


def payload_key(sender: str, version: int, base_version: int | None) -> str:
    """Name of a version's bytes, whole or as the difference from another version."""
    return f"{sender}/{version}" if base_version is None else f"{sender}/{version}-{base_version}"


class WeightUpdateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The version is live."""

    version: int
    pause_ms: float
    """Stall of decoding: from the pause request to the end of the resume request, measured at the server."""
    swap_ms: float
    """Part of the pause in which the weights change; the rest waits for the decoding step under way."""
    transfer_ms: float
    """From the request's arrival until all bytes were received."""
    prepare_ms: float
    """Background work between the last byte and the pause."""


class WeightInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``GET /weight_info``."""

    weight_version: str
    """The label that vLLM gives to tokens: optimizer steps as a decimal number; "default" before the first update."""
    workers: tuple[Address, ...] = ()
    """Where this server's workers give and take weights."""


class WeightCheckRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /check_weights``: compare the live tensors with the bytes that were sent."""

    version: Annotated[int, Meta(ge=0, le=2**53)]


class WeightCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Its answer, and one worker's part of it."""

    is_checked: bool
    """False: the bytes of this version are not there any more, because a newer one is coming in."""
    checksum: str = ""
    """`pipelinerl.weights.digest.checksum` of the bytes that were received."""
    differing: tuple[str, ...] = ()
    """Live parameters that are not what was received."""
    unlearned: tuple[str, ...] = ()
    """Live parameters that could not be compared."""
    check_ms: float = 0.0


# Between two processes that hold weights, in frames of a `wire.Connection`.


class Get(msgspec.Struct, frozen=True, kw_only=True, tag="get"):
    """Send me these bytes as you get them."""

    key: str
    start: Size
    end: Size
    bucket_bytes: Positive
    carriage: Carriage
    beat_s: Seconds
    """Say at least so often that you are alive."""


class Have(msgspec.Struct, frozen=True, kw_only=True, tag="have"):
    """How far do you have these bytes?"""

    key: str
    start: Size


class Had(msgspec.Struct, frozen=True, kw_only=True, tag="had"):
    """Its answer: the end of the bytes that are there without a gap; ``start`` itself if none is."""

    end: Size


class Take(msgspec.Struct, frozen=True, kw_only=True, tag="take"):
    """To a worker, from its own server: pull this update, and tell when it is staged."""

    request: WeightUpdateRequest


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """Its answer: all bytes are here and prepared."""

    transfer_ms: float
    prepare_ms: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Its other answer."""

    error: str


Question = Get | Have | Take
Reply = Had | Staged | Failed
