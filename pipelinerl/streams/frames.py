"""The frame around a record: length, offset and checksums. Pure functions, shared by the files and redis backends.

    frame  = header payload
    header = payload length (uint32) | payload CRC32 (uint32) | offset (uint64) | CRC32 of the 16 bytes before (uint32)

All numbers are little-endian. Without the header's own checksum a damaged length would look like a record that is still
being written, and recovery would cut off every later record.
"""

import mmap
import struct
import zlib
from typing import NamedTuple

from pipelinerl.errors import CorruptStreamError

_FIELDS = struct.Struct("<IIQ")
_CRC = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CRC.size
MAX_PAYLOAD_BYTES = 2**32 - 1  # of a uint32

_UNFILLED_BYTES = 256
"""A frame that ends the file and fails its checksum counts as incomplete if this many bytes at its end are zero."""
_OFFSET = struct.Struct("<Q")
_OFFSET_PLACE = struct.calcsize("<II")
"""Byte of the header at which the offset begins."""

Buffer = bytes | bytearray | memoryview


class Frame(NamedTuple):
    """A complete, verified record in a buffer: ``payload`` and the position just after it."""

    payload: memoryview
    end: int


def header(offset: int, payload: Buffer) -> bytes:
    """Returns the 20 header bytes for ``payload``, which is record number ``offset``."""
    fields = _FIELDS.pack(len(payload), zlib.crc32(payload), offset)
    return fields + _CRC.pack(zlib.crc32(fields))


def framed(offset: int, payload: Buffer) -> bytes:
    """Returns the whole frame of ``payload``, which is record number ``offset``."""
    return header(offset, payload) + payload


def only_payload(content: bytes) -> memoryview:
    """Returns what a file of one frame holds. Raises ``CorruptStreamError`` if it is damaged."""
    if (frame := parse_frame(content, 0, 0)) is None:
        raise CorruptStreamError("it is cut")
    return frame.payload


def is_header(buffer: Buffer | mmap.mmap, start: int, offset: int) -> bool:
    """Returns whether a complete, verified header of record ``offset`` is at ``start``."""
    if len(buffer) - start < HEADER_BYTES:
        return False
    raw = bytes(buffer[start : start + HEADER_BYTES])
    return zlib.crc32(raw[: _FIELDS.size]) == _CRC.unpack_from(raw, _FIELDS.size)[0] and (
        _FIELDS.unpack_from(raw)[2] == offset
    )


def find(content: mmap.mmap, start: int, offset: int) -> int | None:
    """Finds the header of record ``offset`` at or after ``start``. Returns None if there is none."""
    pattern, place = _OFFSET.pack(offset), start + _OFFSET_PLACE
    while (place := content.find(pattern, place)) >= 0:
        if is_header(content, place - _OFFSET_PLACE, offset):
            return place - _OFFSET_PLACE
        place += 1
    return None


def frame_bytes(buffer: Buffer | mmap.mmap, start: int = 0) -> int:
    """Returns the frame length in the header at ``start``, to read a frame that is larger than the buffer.

    The header must be complete and verified by ``parse_frame``.
    """
    return HEADER_BYTES + _FIELDS.unpack_from(buffer, start)[0]


def parse_frame(buffer: Buffer, start: int, offset: int, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> Frame | None:
    """Returns the frame at ``start``, which must be record ``offset``, or None while it is incomplete.

    It is incomplete if the buffer ends before it, or holds only zeros from some byte of it to the buffer's end: space
    that a file system has allocated but not filled. Raises ``CorruptStreamError`` for anything else that does not
    verify.
    """
    available = len(buffer) - start
    if available < HEADER_BYTES:
        return None
    length, payload_crc, found_offset = _FIELDS.unpack_from(buffer, start)
    (header_crc,) = _CRC.unpack_from(buffer, start + _FIELDS.size)
    view = memoryview(buffer)
    if zlib.crc32(view[start : start + _FIELDS.size]) != header_crc:
        if not any(view[start + HEADER_BYTES - 1 :]):
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
        # zeros behind the frame are space that the file system allotted: then one zero at its end is enough
        unfilled = 1 if end < len(buffer) else _UNFILLED_BYTES
        if not any(view[max(end - unfilled, start + HEADER_BYTES) :]):
            return None
        raise CorruptStreamError(f"record {offset}: the payload of {length} bytes fails its checksum")
    return Frame(payload, end)
