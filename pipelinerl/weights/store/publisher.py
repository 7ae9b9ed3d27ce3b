"""The trainer's bookkeeping of a store: which files make up the newest version, and which may be removed."""

import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pipelinerl.weights.protocol import ParamSpec, PayloadRange, StoredFile
from pipelinerl.weights.store.files import Files
from pipelinerl.weights.store.manifest import (
    MAX_BYTES,
    NAME,
    Step,
    StoreError,
    StoreManifest,
    encode_layout,
    extended,
    sealed,
    unsealed,
)

log = logging.getLogger(__name__)

OWN_NAME = re.compile(r"^\.?g\d+-[0-9a-f]{8}-|^\.manifest\.")
"""Files that a publisher wrote, also half-written ones. Others in the folder are left alone."""


@dataclass(eq=False)
class Published:
    """One manifest that servers may have read."""

    key: str
    names: frozenset[str]
    replaced_at: float | None = None


@dataclass(eq=False)
class PublishedFiles:
    """The published manifests, oldest first, and all files of the store."""

    published: list[Published] = field(default_factory=list)
    files: set[str] = field(default_factory=set)

    def replace(self, newest: Published, now: float) -> None:
        for older in self.published:
            if older.replaced_at is None:
                older.replaced_at = now
        self.published.append(newest)
        self.files |= newest.names

    def removable(self, reading: Collection[str], *, keep: int, grace_s: float, now: float) -> frozenset[str]:
        """Forgets manifests that are no longer needed. Returns the files that no other manifest names.

        Args:
            reading: keys of the versions that servers are reading.
        """
        self.published = [
            one
            for number, one in enumerate(reversed(self.published))
            if number < keep or one.key in reading or one.replaced_at is None or now - one.replaced_at < grace_s
        ][::-1]
        needed = frozenset[str]().union(*(one.names for one in self.published))
        return frozenset(self.files - needed)


class Publisher:
    """Publishes the versions of one trainer process.

    Args:
        keep: minimum number of manifests whose files are kept.
        grace_s: time for which files are kept after that.
    """

    def __init__(self, files: Files, *, secret: str, sender: str, keep: int, grace_s: float):
        self._files, self._secret, self._sender = files, secret, sender
        self._revision = 0
        self._keep, self._grace_s = keep, grace_s
        self._manifest: StoreManifest | None = None
        self._layout: tuple[tuple[ParamSpec, ...], StoredFile] | None = None
        self._shelved = PublishedFiles()
        before = self._former()
        self._generation = 1 if before is None else before.generation + 1
        self.prefix = f"g{self._generation}-{secrets.token_hex(4)}"
        """Beginning of the names of this process's files."""
        leftovers = {name for name in files.names() if OWN_NAME.match(name)}
        self._shelved.files = leftovers
        self._shelved.published = [Published("", frozenset(leftovers), time.monotonic())]
        if before is not None:
            self._shelved.replace(Published(before.key, before.names), time.monotonic())

    def revise(self) -> None:
        """Makes servers fetch the next version as a whole one, also if they hold a version with its number."""
        self._revision += 1
        self._manifest = None

    def extends(self, version: int, base_version: int | None, lengths: Sequence[tuple[int, int]]) -> bool:
        """Whether the difference from ``base_version`` may be published: (start, end) of each stripe's."""
        ranges = tuple(
            PayloadRange(start=s, end=e, file=StoredFile(name="unwritten", sha256="0" * 64, num_bytes=e - s))
            for s, e in lengths
        )
        return base_version is not None and self._steps(version, base_version, ranges) is not None

    def publish(
        self, version: int, specs: tuple[ParamSpec, ...], ranges: tuple[PayloadRange, ...], base_version: int | None
    ) -> StoreManifest:
        """Replaces the manifest. All files of ``ranges`` are durable.

        Raises:
            StoreError: the store does not answer. The former version stays published.
        """
        if self._layout is None or self._layout[0] != specs:
            written = self._files.put(f"{self.prefix}-{version}.layout", memoryview(encode_layout(specs)))
            self._layout = (specs, written)
        steps = self._steps(version, base_version, ranges)
        assert steps is not None, "the difference does not follow from what is published"
        manifest = StoreManifest(
            generation=self._generation,
            revision=self._revision,
            sender=f"{self._sender}.{self._revision}",
            layout=self._layout[1],
            steps=steps,
        )
        content = sealed(manifest, self._secret)
        if len(content) > MAX_BYTES:
            raise StoreError(f"a manifest of {len(content)} bytes is over {MAX_BYTES}")
        self._files.put(NAME, memoryview(content))
        self._manifest = manifest
        self._shelved.replace(Published(manifest.key, manifest.names), time.monotonic())
        return manifest

    def wrote(self, names: Collection[str]) -> None:
        """Notes files that were written and may never be published."""
        self._shelved.files |= set(names)

    def clean(self, reading: Collection[str]) -> int:
        """Removes files that nobody needs. Returns their number.

        Raises:
            StoreError: the store does not answer. The files are removed the next time.
        """
        names = self._shelved.removable(reading, keep=self._keep, grace_s=self._grace_s, now=time.monotonic())
        for name in sorted(names):
            self._files.remove(name)
            self._shelved.files.discard(name)
        return len(names)

    def _steps(
        self, version: int, base_version: int | None, ranges: tuple[PayloadRange, ...]
    ) -> tuple[Step, ...] | None:
        step = Step(version=version, base_version=base_version, ranges=ranges)
        return (step,) if base_version is None else extended(self._manifest, step)

    def _former(self) -> StoreManifest | None:
        """The manifest of an earlier process of this run. None if there is none, or it is another run's."""
        content = self._files.get(NAME, MAX_BYTES)
        try:
            return None if content is None else unsealed(content, self._secret)
        except StoreError as error:
            log.warning("event=store_manifest_unknown reason=%s: it is replaced", error)
            return None
