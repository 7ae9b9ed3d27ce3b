"""What trainer and server tell each other about one weight update. Imports msgspec only.

One update is one ``POST /receive_weight_update``: the body is a `WeightUpdateRequest`, the bytes travel through the
transfer group that it names, the answer is a `WeightUpdateAnswer` after the new weights are live.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PATH = "/receive_weight_update"
INFO_PATH = "/weight_info"
CHECK_PATH = "/check_weights"
STALE = "stale"
"""In a refusal's error: the server has lost (restart, another sender) what the request builds on, the transfer group
or the version that a delta starts from. Send everything through a new group."""
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool")

Size = Annotated[int, Meta(ge=0, le=2**48)]
Positive = Annotated[int, Meta(ge=1, le=2**48)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ParamSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter as it travels: the checkpoint's name, the dtype on the wire, the full shape."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    dtype: Literal[DTYPES]  # type: ignore[valid-type]
    shape: Annotated[tuple[Size, ...], Meta(max_length=8)]


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The transfer group of the trainer (rank 0) and one server's workers (ranks 1 …)."""

    backend: Literal["gloo", "nccl", "ipc"]
    host: Annotated[str, Meta(min_length=1, max_length=255)]
    """Where the trainer's store listens."""
    port: Port
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    """Fresh for every (re)connection, so that a group that died is never met again."""
    world_size: Annotated[int, Meta(ge=2, le=4096)]
    is_new: bool
    """False: the server is in this group since an earlier update."""


class WeightUpdateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One update of one server."""

    version: Annotated[int, Meta(ge=0, le=2**53)]
    """Optimizer steps behind these weights."""
    params: Annotated[tuple[ParamSpec, ...], Meta(min_length=1, max_length=1_000_000)]
    group: GroupSpec
    bucket_bytes: Annotated[int, Meta(ge=64, le=2**40)]
    timeout_s: Seconds
    """From the request's arrival until all bytes are here."""
    base_version: int | None = None
    """Delta mode: the bytes encode what changed since this version, which the server must hold. None = dense."""
    payload_bytes: Positive | None = None
    """Delta mode: length of the encoded bytes."""


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
    transfer_workers: int = 1
    """Workers of this server that join a transfer group."""


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
