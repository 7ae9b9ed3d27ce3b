"""Pulls one part of a payload from the nearest source that delivers. A file in the store is a source, too.

Consumes: the part's sources, in order. Produces: bytes in an item of the registry, and what it saw of each source.
Waits for: bytes. It leaves a source that is dead or silent for ``stall_s``, never a slow one, and goes on with the next
one at the offset reached. Ends: at the last byte, or when its caller's check raises.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from pipelinerl.config.backends import TransportName
from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.protocol import HELD_UP, OWN_LINK, Address, Get, Link, Progress, StoredFile
from pipelinerl.weights.protocol import WeightUpdateRequest as Request
from pipelinerl.weights.store.files import MissingFileError, OpenFile, open_files
from pipelinerl.weights.store.manifest import StoreError
from pipelinerl.weights.transfer.bucket import CPU, TRANSPORTS, BucketTransport, NcclTransport
from pipelinerl.weights.transfer.buffers import BufferRegistry, Item, Range
from pipelinerl.weights.transfer.nccl import Group, Groups
from pipelinerl.weights.transfer.source import BEATS
from pipelinerl.weights.transfer.wire import (
    DATA,
    GONE,
    MESSAGE,
    NO_GROUP,
    OTHER,
    UNKNOWN,
    Connection,
    WireError,
    view_of,
)

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""Pause between two rounds over sources that all failed."""
AHEAD_BUCKETS = 2
"""A source is ahead if it has this many buckets more than have come: the next one is already on its way."""
_progress = msgspec.json.Decoder(Progress)


class SourceError(WeightUpdateError):
    """This source does not deliver. Another one may."""


class OtherBytesError(SourceError):
    """This source keeps another shard, in this update and in later ones."""


class BrokenGroupError(WeightUpdateError):
    """The NCCL group with this source is broken. The bytes come over TCP."""


class WithdrawnVersionError(WeightUpdateError):
    """The trainer has replaced these bytes by those of a newer version."""


class DamagedFileError(WeightUpdateError):
    """A file in the store does not hold what was published."""


ByteSource = Address | StoredFile


@dataclass
class LinkClock:
    """Measures the link from one source: for how long its bytes came, and for how long the source was ahead of us."""

    first: int
    """Place of the first byte that is asked of it."""
    upto: int
    """Place up to which bytes have come."""
    end: int
    """End of the part."""
    ahead_bytes: int
    began: float
    at: float
    """When the newest message came."""
    ahead_s: float = 0.0
    is_ahead: bool = False
    """The newest message said so: the link is the limit."""

    def see(self, source_end: int, now: float) -> None:
        """Takes a message: the source has all bytes below ``source_end``. It came behind those below ``upto``."""
        was_ahead, self.is_ahead = self.is_ahead, source_end >= min(self.upto + self.ahead_bytes, self.end)
        if was_ahead and self.is_ahead:
            self.ahead_s += now - self.at
        self.at = now

    def stop(self, now: float) -> None:
        """Ends with the last byte, behind which no message comes. The silence of a source that fails is no limit."""
        if self.is_ahead:
            self.ahead_s += now - self.at


class Puller:
    """Pulls the part with one number in every update. Keeps its connection while the source stays the same."""

    def __init__(
        self,
        registry: BufferRegistry,
        *,
        secret: str,
        device: torch.device,
        groups: Groups,
        pace: Callable[[int], None] | None = None,
    ):
        self._groups = groups
        self._transports = dict[TransportName, BucketTransport]()
        self._registry, self._secret, self._device = registry, secret, device
        self._pace = pace or (lambda num_bytes: None)
        self._connection: tuple[Address, Connection] | None = None
        self._others: set[tuple[ByteSource, str]] = set()
        """Sources that do not keep the shard of this name."""

    def pull(
        self,
        request: Request,
        item: Item,
        number: int,
        sources: Sequence[ByteSource],
        check: Callable[[str], None],
        links: list[Link],
    ) -> None:
        """Fills range ``number`` of ``item``. Adds what it saw of its sources to ``links``, also if it fails.

        Args:
            sources: nearest first, the trainer last.
            check: called often with a description of the last event. Raises when the pull must end.
        Raises:
            WithdrawnVersionError: the trainer, or the store, no longer has these bytes.
            DamagedFileError: the store has other bytes than were published.
            WeightUpdateError: what ``check`` raised.
        """
        part, index, fails, reason = item.ranges[number], 0, 0, ""
        sources = [source for source in sources if (source, item.shard) not in self._others]
        while part.upto < part.end:
            check(reason)
            if fails and fails % len(sources) == 0:
                time.sleep(PAUSE_S)
            source = sources[index]
            try:
                self._pull_from(source, request, item, number, check, links, is_trainer=source == sources[-1])
            except BrokenGroupError as error:
                log.warning("event=nccl_group_left version=%d source=%s reason=%s", request.version, source, error)
                self._hang_up()
                continue
            except OtherBytesError:
                self._others.add((source, item.shard))
                reason = ""
            except (WireError, StoreError) as error:
                reason = f"{source}: {error}"
            except SourceError as error:
                reason = f"{source} {error}"
            if part.upto < part.end:
                if reason:
                    log.info("event=weight_source_left version=%d at=%d reason=%s", request.version, part.upto, reason)
                self._hang_up()
                fails += 1
                index = (index + 1) % len(sources)

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
                    self._registry.advance(item, number, part.upto + count)
        except MissingFileError as error:
            raise WithdrawnVersionError(f"version {request.version} was removed from the store: {error}") from error

    def _pull_from(
        self,
        source: ByteSource,
        request: Request,
        item: Item,
        number: int,
        check: Callable[[str], None],
        links: list[Link],
        *,
        is_trainer: bool,
    ) -> None:
        if isinstance(source, StoredFile):
            self._read(source, request, item, number, check)
            return
        part, now = item.ranges[number], time.monotonic()
        clock = LinkClock(part.upto, part.upto, part.end, AHEAD_BUCKETS * request.bucket_bytes, began=now, at=now)
        group = self._groups.over(source) if request.transport == "nccl" else None
        try:
            self._receive(source, request, item, number, check, clock, group, is_trainer=is_trainer)
        finally:
            if clock.upto > clock.first or clock.ahead_s:
                links.append(_link(source, request, group, clock, part))

    def _receive(
        self,
        source: Address,
        request: Request,
        item: Item,
        number: int,
        check: Callable[[str], None],
        clock: LinkClock,
        group: Group | None,
        *,
        is_trainer: bool,
    ) -> None:
        part = item.ranges[number]
        bucket_transport = self._transport(request, source, group)
        connection = self._connected(source, request)
        known_at = time.monotonic()
        connection.send_message(_question(request, item, part, group))
        while part.upto < part.end:
            kind, length = connection.receive()
            if kind == DATA:
                end = part.upto + length
                if end > part.end:
                    raise SourceError(f"sent {end - part.end} bytes too many")
                try:
                    bucket_transport.receive_bucket(connection, item.slice(part.upto, end))
                except WireError as error:
                    if group is not None and group.is_broken:
                        raise BrokenGroupError(str(error)) from error
                    raise
                self._pace(length)
                clock.upto = end
                self._registry.advance(item, number, end)
            elif kind == MESSAGE:
                clock.see(connection.read_message(length, _progress).end, time.monotonic())
            elif kind == GONE and is_trainer:
                why = OWN_LINK if clock.is_ahead else HELD_UP
                raise WithdrawnVersionError(f"the trainer has withdrawn version {request.version}: {why}")
            elif kind == NO_GROUP and group is not None:
                group.break_up()
                raise BrokenGroupError(f"{source} has left it")
            elif kind == OTHER:
                raise OtherBytesError("keeps another shard")
            elif kind == GONE:
                raise SourceError("no longer has these bytes")
            elif kind == UNKNOWN and time.monotonic() - known_at >= request.stall_s:
                raise SourceError(f"was not sent this version within {request.stall_s:g} s")
            elif kind != UNKNOWN:
                raise SourceError(f"sent a frame of kind {kind}")
            if kind != UNKNOWN:
                known_at = time.monotonic()
            check(f"{OWN_LINK if clock.is_ahead else HELD_UP}: {source} was sending")
        clock.stop(time.monotonic())

    def _transport(self, request: Request, source: Address, group: Group | None) -> BucketTransport:
        if group is not None:
            return NcclTransport(group, group.order.members.index(source), request.stall_s)
        name = _without_group(request.transport)
        if name not in self._transports:
            self._transports[name] = TRANSPORTS[name](self._device)
        return self._transports[name]

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
        self._connection = None


def _without_group(transport: TransportName) -> TransportName:
    return "tcp" if transport == "nccl" else transport


def _question(request: Request, item: Item, part: Range, group: Group | None) -> Get:
    """Asks for the rest of a part, over an NCCL group or without one."""
    transport = _without_group(request.transport) if group is None else request.transport
    return Get(
        key=item.key,
        start=part.upto,
        end=part.end,
        shard=item.shard,
        runs=part.runs,
        bucket_bytes=request.bucket_bytes,
        transport=transport,
        beat_s=request.stall_s / BEATS,
        group="" if group is None else group.order.name,
        member=0 if group is None else group.order.rank,
    )


def _link(source: Address, request: Request, group: Group | None, clock: LinkClock, part: Range) -> Link:
    return Link(
        source=source,
        transport=_without_group(request.transport) if group is None else request.transport,
        num_bytes=clock.upto - clock.first,
        part_bytes=part.end - part.start,
        seconds=time.monotonic() - clock.began,
        ahead_s=clock.ahead_s,
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
