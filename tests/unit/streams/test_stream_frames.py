"""Frames: whole and true, not yet there, or an error; nothing else, whatever the bytes."""

import random

import pytest

from pipelinerl.errors import CorruptStreamError
from pipelinerl.streams import frames
from pipelinerl.streams.frames import framed
from tests.says import says


def test_header_is_twenty_bytes_of_length_checksum_and_offset():
    # CRC32 of b"abc" is 352441c2.
    header = frames.header(5, b"abc")
    assert header[:16] == bytes.fromhex("03000000 c2412435 0500000000000000")
    assert int.from_bytes(header[16:], "little") == bitwise_crc32(header[:16])


def test_parse_gives_payload_and_end():
    buffer = framed(0, b"first") + framed(1, b"") + framed(2, b"third")
    first = frames.parse_frame(buffer, 0, 0)
    assert first is not None
    second = frames.parse_frame(buffer, first.end, 1)
    assert second is not None
    third = frames.parse_frame(buffer, second.end, 2)
    assert third is not None
    assert [bytes(f.payload) for f in (first, second, third)] == [b"first", b"", b"third"]
    assert third.end == len(buffer)


def test_parse_incomplete_frame_is_not_yet_there():
    whole = framed(7, b"payload")
    assert all(frames.parse_frame(whole[:n], 0, 7) is None for n in range(len(whole)))
    assert frames.parse_frame(bytes(100), 0, 7) is None


def test_parse_frame_torn_at_any_byte_before_unfilled_space_is_not_yet_there():
    payload = bytes(range(1, 201)) * 2
    whole = framed(7, payload)
    for kept in range(len(whole)):
        space = bytes(len(whole) - kept + 4096)
        assert frames.parse_frame(whole[:kept] + space, 0, 7) is None, kept
    assert frames.parse_frame(whole + bytes(4096), 0, 7) is not None


def test_parse_flipped_bit_before_unfilled_space_is_damage():
    whole = framed(7, bytes(range(1, 201)))
    for place in (0, 5, 17, 25, len(whole) - 2):
        flipped = bytearray(whole)
        flipped[place] ^= 4
        with pytest.raises(CorruptStreamError):
            frames.parse_frame(bytes(flipped) + bytes(4096), 0, 7)


def test_parse_zeros_before_data_are_damage():
    with pytest.raises(CorruptStreamError, match="record 7: the frame header"):
        frames.parse_frame(bytes(20) + b"data", 0, 7)


def test_parse_wrong_offset_and_size_are_named():
    with pytest.raises(CorruptStreamError, match=says("record 3", "record 2")):
        frames.parse_frame(framed(2, b"x"), 0, 3)
    with pytest.raises(CorruptStreamError, match=says("record 2", "9 bytes", "streams.max_record_mb", 8)):
        frames.parse_frame(framed(2, b"123456789"), 0, 2, max_payload_bytes=8)


def test_ten_thousand_fuzzed_frames_never_give_a_wrong_record():
    rng = random.Random(20260101)
    outcomes = {"none": 0, "refused": 0, "true": 0}
    for _ in range(10_000):
        payload = rng.randbytes(rng.randrange(40))
        fuzzed = bytearray(framed(3, payload))
        kind = rng.randrange(4)
        if kind == 0:
            fuzzed = bytearray(rng.randbytes(rng.randrange(80)))
        elif kind == 1:
            for _ in range(rng.randrange(1, 6)):
                fuzzed[rng.randrange(len(fuzzed))] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del fuzzed[rng.randrange(len(fuzzed)) :]
        else:
            start = rng.randrange(len(fuzzed))
            fuzzed[start : start + rng.randrange(8)] = rng.randbytes(rng.randrange(8))
        try:
            found = frames.parse_frame(fuzzed, 0, 3)
        except CorruptStreamError:
            outcomes["refused"] += 1
            continue
        if found is None:
            outcomes["none"] += 1
        else:
            assert bytes(found.payload) == payload
            outcomes["true"] += 1
    assert outcomes["refused"] > 4000
    assert outcomes["none"] > 1000


def bitwise_crc32(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
