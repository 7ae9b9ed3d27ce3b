"""The manifest of a store: the newest version as a whole one and the differences that lead from it to the newest. Pure.

    hexadecimal HMAC-SHA256 of the rest under the run's secret | newline | JSON of a `StoreManifest`

Without the secret, who can write to the store can keep servers from new versions, but cannot make them take his bytes.
"""

import hmac
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import msgspec
from msgspec import Meta

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import ParamSpec, PayloadRange, StoredFile, payload_key

NAME = "manifest"
MAX_BYTES = 8 << 20
"""Largest manifest that is read, so that a foreign file fills no memory: `MAX_STEPS` versions of some 700 ranks."""
MAX_LAYOUT_BYTES = 256 << 20
"""The same of the list of parameters: a million of 256 bytes each."""
MAX_STEPS = 64
"""Most versions in a manifest: a whole one, and differences. A late server fetches and applies them all."""

Version = Annotated[int, Meta(ge=0, le=2**53)]
Precedence = tuple[int, int, int]
"""(generation, revision, version)."""


class StoreError(WeightUpdateError):
    """The store does not answer, or what lies there is not what was published."""


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version, or its difference from the version of the step before."""

    version: Version
    base_version: Version | None = None
    """None = a whole version."""
    ranges: Annotated[tuple[PayloadRange, ...], Meta(min_length=1, max_length=4096)] = msgspec.field(name="parts")
    """The stripes of the trainer's ranks, each with its file."""

    @property
    def num_bytes(self) -> int:
        return sum(one.end - one.start for one in self.ranges)


class StoreManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The newest version of a store, and how to get there."""

    generation: Annotated[int, Meta(ge=1, le=2**53)]
    """Rises with every trainer process that writes to the store."""
    revision: Version = 0
    """Rises when servers must fetch a whole version again."""
    sender: Annotated[str, Meta(min_length=1, max_length=64)]
    """Name of the trainer process, and the revision."""
    layout: StoredFile
    """A JSON list of the parameters (`ParamSpec`)."""
    steps: Annotated[tuple[Step, ...], Meta(min_length=1, max_length=MAX_STEPS)]
    """A whole version first."""

    def __post_init__(self) -> None:
        if self.steps[0].base_version is not None:
            raise ValueError("the first step is not a whole version")
        for before, step in pairwise(self.steps):
            if step.base_version != before.version or step.version <= before.version:
                raise ValueError(f"version {step.version} does not follow from version {before.version}")
        if any(one.file is None for step in self.steps for one in step.ranges):
            raise ValueError("a range has no file")

    @property
    def version(self) -> int:
        return self.steps[-1].version

    @property
    def key(self) -> str:
        return payload_key(self.sender, self.version, None)

    @property
    def order(self) -> "Precedence":
        """Rises with every manifest of a store."""
        return self.generation, self.revision, self.version

    @property
    def names(self) -> frozenset[str]:
        """Files that it names."""
        names = [one.file.name for step in self.steps for one in step.ranges if one.file is not None]
        return frozenset((self.layout.name, *names))

    def steps_from(self, held: "Precedence | None") -> tuple[Step, ...]:
        """Returns the steps that lead to the newest version from the ``order`` that a server holds (None = nothing)."""
        if held is not None and held[:2] == self.order[:2]:
            later = [step for step in self.steps if step.version > held[2]]
            if not later or later[0].base_version == held[2]:
                return tuple(later)
        return self.steps


def extended(before: StoreManifest | None, step: Step) -> tuple[Step, ...] | None:
    """Returns the steps up to a difference, or None if a whole version must be written instead."""
    if before is None or step.base_version != before.version or len(before.steps) >= MAX_STEPS:
        return None
    steps = (*before.steps, step)  # a server that comes late reads all of them
    return steps if sum(later.num_bytes for later in steps[1:]) <= steps[0].num_bytes else None


def sealed(manifest: StoreManifest, secret: str) -> bytes:
    """Returns the content of the manifest's file."""
    body = msgspec.json.encode(manifest)
    return _signature(body, secret) + b"\n" + body


def unsealed(content: bytes, secret: str) -> StoreManifest:
    """Returns the manifest. Raises ``StoreError`` if it was not written with this secret, or is malformed."""
    signature, _, body = content.partition(b"\n")
    if not hmac.compare_digest(signature, _signature(body, secret)):
        raise StoreError(f"{NAME} ({len(content)} bytes) is not signed with this run's secret")
    try:
        return msgspec.json.decode(body, type=StoreManifest)
    except ValueError as error:
        raise StoreError(f"{NAME} is malformed: {error}") from error


def encode_layout(specs: Sequence[ParamSpec]) -> bytes:
    return msgspec.json.encode(specs)


def decode_layout(content: bytes) -> tuple[ParamSpec, ...]:
    """Raises ``StoreError`` if this is no list of parameters."""
    try:
        return msgspec.json.decode(content, type=tuple[ParamSpec, ...])
    except ValueError as error:
        raise StoreError(f"the list of parameters is malformed: {error}") from error


def _signature(body: bytes, secret: str) -> bytes:
    if not secret:
        raise StoreError("there is no secret to sign with")
    return hmac.digest(secret.encode(), b"weights" + body, "sha256").hex().encode()
