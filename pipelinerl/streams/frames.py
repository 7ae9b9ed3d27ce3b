"""The bytes around a record: length, offset and checksums. Pure; used alike by the files and the redis backend.

    frame  = header payload
    header = payload length (uint32) | payload CRC32 (uint32) | offset (uint64) | CRC32 of the 16 bytes before (uint32)

All little-endian. The header has a checksum of its own so that a damaged length is recognised as damage: without it, it
would look like a record that is still being written, and a recovering writer would cut off every record behind it.
"""

import struct
import zlib
from typing import NamedTuple

from pipelinerl.errors import CorruptStreamError

_FIELDS = struct.Struct("<IIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
MAX_PAYLOAD_BYTES = 2**32 - 1

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """A whole, verified record in a buffer: ``payload`` and the position just behind it."""

    payload: memoryview
    end: int


def header(offset: int, payload: Buffer) -> bytes:
    """The 20 bytes that precede ``payload``, the record with number ``offset``."""
    fields = _FIELDS.pack(len(payload), zlib.crc32(payload), offset)
    return fields + _CRC.pack(zlib.crc32(fields))


def frame_bytes(buffer: Buffer, start: int = 0) -> int:
    """Length of the frame at ``start`` as its header says, for reading a frame larger than the buffer.

    The header must be complete and verified by ``parse``.
    """
    return HEADER_BYTES + _FIELDS.unpack_from(buffer, start)[0]


def parse(buffer: Buffer, start: int, offset: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame | None:
    """Returns the frame at ``start``, which must be record ``offset``; None while it is not completely there.

    A frame is incomplete when bytes are missing at the end of the buffer, or when nothing but zeros follows (space that
    a file system has allotted but not filled). Raises ``CorruptStreamError`` for anything else that does not verify.
    """
    available = len(buffer) - start
    if available < HEADER_BYTES:
        return None
    length, payload_crc, found_offset = _FIELDS.unpack_from(buffer, start)
    (header_crc,) = _CRC.unpack_from(buffer, start + _FIELDS.size)
    view = memoryview(buffer)
    if zlib.crc32(view[start : start + _FIELDS.size]) != header_crc:
        if not any(view[start : start + HEADER_BYTES]) and not any(view[start:]):
            return None
        raise CorruptStreamError(f"record {offset}: the frame header fails its checksum")
    if found_offset != offset:
        raise CorruptStreamError(f"record {offset}: the frame says it is record {found_offset}")
    if length > max_payload_bytes:
        raise CorruptStreamError(
            f"record {offset}: {length} bytes, more than streams.max_record_mb allows ({max_payload_bytes} bytes)"
        )
    end = start + HEADER_BYTES + length
    if end > len(buffer):
        return None
    payload = view[start + HEADER_BYTES : end]
    if zlib.crc32(payload) != payload_crc:
        raise CorruptStreamError(f"record {offset}: the payload of {length} bytes fails its checksum")
    return Frame(payload, end)
