"""The server's end of a store: looks for newer versions, and has the server stage and swap them like pushed ones.

Consumes: the manifest, every ``poll_s``. Produces: updates of this server. Waits for: the store, in a thread. Ends:
with the process. A version that is incomplete, changed or gone is not served, and the next look begins again.
"""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

from pipelinerl.config.paths import without_credentials
from pipelinerl.config.sections import WeightsSection
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Address, PayloadRange, StoredFile, WeightUpdateAnswer, WeightUpdateRequest
from pipelinerl.weights.store.files import open_files
from pipelinerl.weights.store.manifest import (
    MAX_BYTES,
    MAX_LAYOUT_BYTES,
    NAME,
    Precedence,
    Step,
    StoreError,
    StoreManifest,
    decode_layout,
    unsealed,
)
from pipelinerl.weights.transfer.chain import BACKUPS

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 30.0
"""The pause doubles up to this while the same version cannot be taken."""


class Updates(Protocol):
    """The methods of `pipelinerl.inference.weight_update.UpdateControl` used here, from the server's loop."""

    @property
    def workers(self) -> tuple[Address, ...]: ...
    async def update(self, requests: Sequence[WeightUpdateRequest]) -> WeightUpdateAnswer: ...
    async def begin_reading(self, key: str) -> None: ...


class StoreFollower:
    """Keeps one server at the newest version of a store.

    Args:
        loop: the server's, in which ``updates`` runs.
        url: the store (`pipelinerl.config.paths.weight_store`).
    """

    def __init__(
        self, updates: Updates, loop: asyncio.AbstractEventLoop, settings: WeightsSection, *, url: str, secret: str
    ):
        self._updates, self._loop, self._settings = updates, loop, settings
        self._url, self._secret = url, secret
        self._files = open_files(url)
        self._held: Precedence | None = None
        self.failures = 0
        """Versions that could not be taken, and looks that failed."""
        self.reason = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weight-follower", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends after the current look. Does not wait for the store."""
        self._closed.set()

    def join(self) -> None:
        """Waits until the current look has ended."""
        self._thread.join()

    def _run(self) -> None:
        pause_s = self._settings.store_poll_s
        while not self._closed.wait(pause_s):
            try:
                self._look()
                pause_s, self.reason = self._settings.store_poll_s, ""
            except WeightUpdateError as error:
                self._failed(str(error))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception:  # the thread's boundary: the server goes on with its weights
                if not self._closed.is_set():
                    log.exception("event=weight_follower_failed")
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _look(self) -> None:
        """Takes the newest version if the server does not have it.

        Raises:
            WeightUpdateError: the store does not answer, or what lies there is not what was published.
        """
        content = self._files.get(NAME, MAX_BYTES)
        if content is None:
            return
        manifest = unsealed(content, self._secret)
        if self._held is not None and manifest.order < self._held:
            raise StoreError(f"{NAME} is older than what this server has: {manifest.order} < {self._held}")
        if manifest.order != self._held:
            self._wait(self._updates.begin_reading(manifest.key))
            try:
                self._fetch(manifest)
            finally:
                self._wait(self._updates.begin_reading(""))

    def _fetch(self, manifest: StoreManifest) -> None:
        steps = manifest.steps_from(self._held)
        layout = _read_layout(self._url, manifest.layout)
        if steps[0].base_version is None and steps[0].num_bytes != layout.num_bytes:
            raise StoreError(f"version {steps[0].version} has {steps[0].num_bytes} bytes, not {layout.num_bytes}")
        for step in steps:
            self._check_sizes(step)
        requests = [self._request(manifest, layout, step) for step in steps]
        held, self._held = self._held, None  # a failure may leave some of the new version where the base was
        answer = self._wait(self._updates.update(requests))
        self._held = manifest.order
        log.info(
            "event=version_fetched version=%d bytes=%d steps=%d transfer_ms=%.0f from=%s",
            *(manifest.version, sum(step.num_bytes for step in steps), len(steps), answer.transfer_ms, held),
        )

    def _check_sizes(self, step: Step) -> None:
        """Finds files that are cut off or gone before any memory is changed for them."""
        for one in step.ranges:
            assert one.file is not None
            size = self._files.size(one.file.name)
            if size != one.file.num_bytes:
                raise StoreError(f"{one.file.name} has {size} bytes instead of {one.file.num_bytes}")

    def _request(self, manifest: StoreManifest, layout: Layout, step: Step) -> WeightUpdateRequest:
        """Returns the request. The first worker reads the files, each other one from those before it."""
        settings, workers = self._settings, self._updates.workers
        routes = []
        for number in range(len(workers)):
            near = tuple(reversed(workers[max(number - BACKUPS - 1, 0) : number]))
            routes.append(tuple(PayloadRange(start=p.start, end=p.end, sources=near, file=p.file) for p in step.ranges))
        return WeightUpdateRequest(
            sender=manifest.sender,
            version=step.version,
            params=layout.specs,
            workers=tuple(routes),
            transport="tcp",
            bucket_bytes=int(settings.bucket_mb * 2**20),
            timeout_s=settings.timeout_s,
            stall_s=settings.stall_s,
            base_version=step.base_version,
            store=self._url,
            is_last=step.version == manifest.version,
        )

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _failed(self, reason: str) -> None:
        is_new, self.reason = reason != self.reason, reason
        self.failures += 1  # after the reason, because others wait for the count and then read it
        if is_new:
            log.warning(
                "event=version_not_fetched store=%s failures=%d reason=%s",
                *(without_credentials(self._url), self.failures, reason),
            )


@lru_cache(maxsize=2)
def _read_layout(url: str, file: StoredFile) -> Layout:
    content = open_files(url).get(file.name, min(file.num_bytes, MAX_LAYOUT_BYTES))
    if content is None:
        raise StoreError(f"{file.name} is not there")
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise StoreError(f"{file.name} is not what was published")
    return Layout(decode_layout(content))
