"""Pulls one part of a payload from the nearest source that delivers.

Consumes: the part's sources, in order. Produces: bytes in an item of the shelf, as they arrive.
Waits for: bytes. It leaves a source that is dead, silent for ``stall_s``, or ``stall_s`` behind the source after it,
and continues with the next one at the offset reached. A file in the store is a source, too.
Ends: at the last byte, or when its caller's check raises.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.carriage import CPU, Carrier, make_carrier
from pipelinerl.weights.protocol import Address, Get, Had, Have, StoredFile
from pipelinerl.weights.protocol import WeightUpdateRequest as Request
from pipelinerl.weights.shelf import Item, Range, Shelf
from pipelinerl.weights.store.files import MissingFileError, OpenFile, open_files
from pipelinerl.weights.store.manifest import StoreError
from pipelinerl.weights.wire import ALIVE, DATA, GONE, OTHER, UNKNOWN, Connection, WireError, view_of

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Pause between two rounds over sources that all failed."""
BEATS = 4
"""Number of signs of life that a source sends within ``stall_s``."""
_extents = msgspec.json.Decoder(Had)


class SourceError(WeightUpdateError):
    """This source does not deliver. Another one may."""


class OtherBytesError(SourceError):
    """This source keeps another shard, in this update and in later ones."""


class WithdrawnVersionError(WeightUpdateError):
    """The trainer has replaced these bytes by those of a newer version."""


class DamagedFileError(WeightUpdateError):
    """A file in the store does not hold what was published."""


ByteSource = Address | StoredFile


class Taker:
    """Pulls the part with one number in every update. Keeps its connection while the source stays the same."""

    def __init__(self, shelf: Shelf, *, secret: str, device: torch.device):
        self._shelf, self._secret, self._device = shelf, secret, device
        self._connection: tuple[Address, Connection] | None = None
        self._carriers: dict[str, Carrier] = {}
        self._others: set[tuple[ByteSource, str]] = set()
        """Sources that do not keep the shard of this name."""

    def pull(
        self, request: Request, item: Item, number: int, sources: Sequence[ByteSource], check: Callable[[str], None]
    ) -> None:
        """Fills range ``number`` of ``item``.

        Args:
            sources: nearest first, the trainer last.
            check: called often with a description of the last event. Raises when the pull must end.
        Raises:
            WithdrawnVersionError: the trainer, or the store, no longer has these bytes.
            DamagedFileError: the store has other bytes than were published.
            WeightUpdateError: what ``check`` raised.
        """
        part, turn, reason = item.ranges[number], 0, ""
        sources = [source for source in sources if (source, item.shard) not in self._others]
        watch = Watch(self._secret, request, sources, item)
        try:
            while part.upto < part.end:
                check(reason)
                if turn and turn % len(sources) == 0:
                    time.sleep(PAUSE_S)
                source = sources[turn % len(sources)]
                following = sources[(turn + 1) % len(sources)]
                try:
                    self._pull_from(source, request, item, number, check, watch.of(source, following))
                except OtherBytesError:
                    self._others.add((source, item.shard))
                    reason = ""
                except (WireError, StoreError) as error:
                    reason = f"{source}: {error}"
                except SourceError as error:
                    reason = f"{source} {error}"
                if part.upto < part.end:
                    if reason:
                        log.info(
                            "event=weight_source_left version=%d at=%d reason=%s", request.version, part.upto, reason
                        )
                    self._hang_up()
                    turn += 1
        finally:
            watch.close()

    def interrupt(self) -> None:
        """Makes the current pull call its ``check`` now. Any thread may call it."""
        held = self._connection
        if held is not None:
            held[1].interrupt()

    def close(self) -> None:
        self._hang_up()

    def _read(self, file: StoredFile, request: Request, item: Item, number: int, check: Callable[[str], None]) -> None:
        """Reads the rest of a part from its file. The hash covers also the bytes that came from elsewhere."""
        part, digest = item.ranges[number], hashlib.sha256()
        for start in range(part.start, part.upto, request.bucket_bytes):
            digest.update(view_of(item.slice(start, min(start + request.bucket_bytes, part.upto)).cpu()))
        try:
            with open_files(request.store).open(file.name, request.bucket_bytes) as reader:
                if part.upto > part.start:
                    reader.seek(part.upto - part.start)
                while part.upto < part.end:
                    check(f"{file} was being read")
                    bucket = item.slice(part.upto, min(part.upto + request.bucket_bytes, part.end))
                    count = _fill(reader, bucket, digest)
                    if count == 0:
                        raise DamagedFileError(f"{file} ends {part.end - part.upto} bytes too early")
                    if part.upto + count == part.end and digest.hexdigest() != file.sha256:
                        raise DamagedFileError(f"{file} has SHA-256 {digest.hexdigest()} instead of {file.sha256}")
                    self._shelf.advance(item, number, part.upto + count)
        except MissingFileError as error:
            raise WithdrawnVersionError(f"version {request.version} was removed from the store: {error}") from error

    def _pull_from(
        self,
        source: ByteSource,
        request: Request,
        item: Item,
        number: int,
        check: Callable[[str], None],
        watch: "Watch",
    ) -> None:
        if isinstance(source, StoredFile):
            self._read(source, request, item, number, check)
            return
        part = item.ranges[number]
        connection = self._connected(source, request)
        connection.send_message(_question(request, item, part))
        if request.carriage not in self._carriers:
            carrier = make_carrier(request.carriage, connection, self._device, gives=False)
            self._carriers[request.carriage] = carrier
        carrier, known_at = self._carriers[request.carriage], time.monotonic()
        while part.upto < part.end:
            kind, length = connection.receive()
            if kind == DATA:
                end = part.upto + length
                if end > part.end:
                    raise SourceError(f"sent {end - part.end} bytes too many")
                carrier.take(connection, item.slice(part.upto, end))
                self._shelf.advance(item, number, end)
            elif kind == GONE and source == watch.origin:
                raise WithdrawnVersionError(f"the trainer has withdrawn version {request.version}")
            elif kind == OTHER:
                raise OtherBytesError("keeps another shard")
            elif kind == GONE:
                raise SourceError("has these bytes no more")
            elif kind == UNKNOWN and time.monotonic() - known_at >= request.stall_s:
                raise SourceError(f"was not sent this version within {request.stall_s:g} s")
            elif kind not in (ALIVE, UNKNOWN):
                raise SourceError(f"sent a frame of kind {kind}")
            if kind != UNKNOWN:
                known_at = time.monotonic()
            check(f"{source} was sending")
            watch.look(part.upto)

    def _connected(self, source: Address, request: Request) -> Connection:
        if self._connection is not None and self._connection[0] == source:
            self._connection[1].set_patience(request.stall_s)
            return self._connection[1]
        self._hang_up()
        connection = Connection.dial(source, self._secret, request.stall_s)
        self._connection = (source, connection)
        return connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
        self._connection, self._carriers = None, {}


def _question(request: Request, item: Item, part: Range) -> Get:
    """Asks for the rest of a part."""
    return Get(
        key=item.key,
        start=part.upto,
        end=part.end,
        shard=item.shard,
        runs=part.runs,
        bucket_bytes=request.bucket_bytes,
        carriage=request.carriage,
        beat_s=request.stall_s / BEATS,
    )


def _fill(reader: OpenFile, bucket: torch.Tensor, digest: "hashlib._Hash") -> int:
    """Reads at most a bucket and adds it to the digest. Returns the number of bytes, 0 at the end of the file."""
    host = bucket if bucket.device == CPU else torch.empty_like(bucket, device=CPU)
    view = view_of(host)
    count = reader.readinto(view) or 0
    digest.update(view[:count])
    if host is not bucket:
        bucket[:count].copy_(host[:count])
    return count


class Watch:
    """Detects a slow source by comparing it with the source after it.

    If that other receiver had more bytes half of ``stall_s`` ago than we have now, our source is slow, and not the
    chain before it. The trainer always has all bytes, so a taker whose next source is the trainer compares with the
    expected duration instead. It reports only once per pull, because a taker with a slow link of its own would
    otherwise switch between sources for ever.
    """

    def __init__(self, secret: str, request: Request, sources: Sequence[ByteSource], item: Item):
        self._secret, self._request, self.origin = secret, request, sources[-1]
        self._key, self._shard = item.key, item.shard
        self._following: ByteSource | None = None
        self._connection: Connection | None = None
        self._started = self._asked_at = time.monotonic()
        self._had: int | None = None
        self._is_used_up = False

    def of(self, source: ByteSource, following: ByteSource) -> "Watch":
        """Starts comparing ``source`` with ``following``."""
        self.close()
        self._following = following if source != self.origin else None
        self._asked_at, self._had = time.monotonic(), None
        return self

    def look(self, upto: int) -> None:
        """Called after every frame with the offset reached.

        Raises:
            SourceError: the source in use is slow.
        """
        now, half_s = time.monotonic(), self._request.stall_s / 2
        if self._is_used_up or self._following is None or now - self._asked_at < half_s:
            return
        if self._following == self.origin:
            expected_s = self._request.expected_s
            is_slow = expected_s > 0 and now - self._started > self._request.stall_s + 2 * expected_s
        else:
            is_slow = self._had is not None and self._had > upto
        if is_slow:
            self._is_used_up = True
            raise SourceError(f"is {half_s:g} s or more behind {self._following}")
        self._asked_at = now
        if isinstance(self._following, Address):
            self._had = self._ask(self._following, upto)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, source: Address, start: int) -> int | None:
        """Asks how far the source has the payload. Returns None if it does not answer."""
        try:
            if self._connection is None:
                self._connection = Connection.dial(source, self._secret, self._request.stall_s / BEATS)
            return self._connection.ask(Have(key=self._key, start=start, shard=self._shard), _extents).end
        except WireError:
            self.close()
            return None
