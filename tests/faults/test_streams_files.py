"""Streams in files under torn writes, flipped bits, killed writers, full disks and read-only folders."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend
from pipelinerl.streams.files import FilesAppender, FilesBackend, FilesCursor, cursor
from pipelinerl.streams.files.folder import segment_bases
from pipelinerl.streams.files.segment import MAGIC
from tests.says import says
from tests.stream_files import MAX, open_appender, read, write
from tests.waiting import wait_until

PAYLOADS = [b"first", b"", b"third record", b"4"]


@pytest.fixture
def spec(tmp_path: Path) -> SingleStreamSpec:
    return SingleStreamSpec(tmp_path, "actor")


@pytest.fixture
def written(spec: SingleStreamSpec) -> bytes:
    """The segment of a stream that holds PAYLOADS."""
    write(spec, PAYLOADS)
    return segment(spec).read_bytes()


def segment(spec: SingleStreamSpec, base: int = 0) -> Path:
    return spec.path / f"{base:020d}.log"


def commit(spec: SingleStreamSpec, name: str, position: int) -> None:
    (spec.path / "readers").mkdir(exist_ok=True)
    (spec.path / "readers" / name).write_text(f"{position}\n")


def positions_read(spec: SingleStreamSpec, name: str) -> list[int]:
    reader = FilesCursor(spec, name, None, max_bytes=MAX, durable=False)
    found = [offset for _ in range(3) for offset, _ in reader.read(0)]
    reader.close()
    return found


def test_every_truncation_is_read_as_whole_records_and_written_on(spec: SingleStreamSpec, written: bytes):
    ends = [8, 33, 53, 85, 106]
    assert ends[-1] == len(written)
    for length in range(len(written) + 1):
        segment(spec).write_bytes(written[:length])
        whole = max(sum(end <= length for end in ends) - 1, 0)
        assert read(spec) == (PAYLOADS[:whole], None), f"cut at {length}"
        write(spec, [b"after"])
        assert read(spec) == ([*PAYLOADS[:whole], b"after"], None), f"written on after a cut at {length}"


def test_torn_tail_that_is_cut_off_is_logged(spec: SingleStreamSpec, written: bytes, caplog: pytest.LogCaptureFixture):
    segment(spec).write_bytes(written[:-1])
    write(spec, [])
    assert "event=torn_tail" in caplog.text
    assert "bytes=20 next_offset=3" in caplog.text


def test_every_flipped_bit_that_a_reader_needs_ends_reading_and_writing(
    spec: SingleStreamSpec, written: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    commit(spec, "slow", 0)
    for position in range(8, len(written)):
        for bit in range(8):
            flipped = bytearray(written)
            flipped[position] ^= 1 << bit
            segment(spec).write_bytes(flipped)
            delivered, error = read(spec)
            assert isinstance(error, CorruptStreamError), f"byte {position}, bit {bit}"
            assert str(segment(spec)) in str(error)
            assert delivered == PAYLOADS[: len(delivered)]
            with pytest.raises(CorruptStreamError, match="reader slow is at record 0"):
                open_appender(spec)
            assert segment(spec).read_bytes() == flipped, "damage is left for a person to look at"


def test_no_flipped_bit_that_every_reader_has_passed_matters(
    spec: SingleStreamSpec, written: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    for position in range(len(written)):
        for bit in range(8):
            for path in spec.path.glob("*.log"):
                path.unlink()
            flipped = bytearray(written)
            flipped[position] ^= 1 << bit
            segment(spec).write_bytes(flipped)
            commit(spec, "fast", len(PAYLOADS))
            reader = FilesCursor(spec, "fast", None, max_bytes=MAX, durable=False)
            write(spec, [b"after"])
            assert [(o, bytes(p)) for o, p in reader.read(0)] == [(4, b"after")], f"byte {position}, bit {bit}"
            reader.close()
            late = FilesCursor(spec, "fast", len(PAYLOADS), max_bytes=MAX, durable=False)
            assert [bytes(p) for _, p in late.read(0)] == [b"after"]
            late.close()


def test_damage_in_a_topic_that_nobody_follows_is_passed_over(
    spec: SingleStreamSpec, written: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    set_streams_backend("files", fsync="never")
    flipped = bytearray(written)
    flipped[8 + 20 + 5 + 20 + 20] ^= 1  # the payload of record 2
    segment(spec).write_bytes(flipped)
    write(spec, [b"after"])
    with open_reader(spec, Any, name=None, over_damage=True) as reader:
        monkeypatch.setattr(reader, "_decode", lambda _, payload: bytes(payload))
        assert reader.read_all() == [(0, b"first"), (1, b""), (3, b"4"), (4, b"after")]


def test_deleted_segments_that_every_reader_has_passed_do_not_matter(spec: SingleStreamSpec):
    write(spec, [bytes(60)] * 6, segment_bytes=100)
    commit(spec, "fast", 6)
    commit(spec, "slow", 5)
    segment(spec, 2).unlink()
    write(spec, [b"seventh"])
    assert positions_read(spec, "slow") == [5, 6]
    segment(spec, 0).unlink()
    segment(spec, 4).unlink()
    with pytest.raises(CorruptStreamError, match=says("records 0 to 5", "lost", "reader slow", "record 5")):
        open_appender(spec)
    commit(spec, "slow", 6)
    write(spec, [b"new"])
    assert segment_bases(spec.path) == [6]
    assert positions_read(spec, "fast") == positions_read(spec, "slow") == [6]


def test_positions_and_what_they_point_behind_are_on_the_disk_first(
    spec: SingleStreamSpec, monkeypatch: pytest.MonkeyPatch
):
    """The order in which the disk sees a writer, a reader's sync and commit, and the deletion of a segment."""
    events: list[str] = []
    sync, replace, unlink = os.fsync, os.replace, os.unlink

    def name_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(str(spec.exp_path)).lstrip("/")

    monkeypatch.setattr(os, "fsync", lambda fd: (sync(fd), events.append(f"sync {name_of(fd)}"))[0])
    monkeypatch.setattr(os, "replace", lambda a, b: (replace(a, b), events.append(f"rename {Path(b).name}"))[0])
    monkeypatch.setattr(Path, "unlink", lambda path: (unlink(path), events.append(f"delete {path.name}"))[0])
    appender = FilesAppender(spec, 100, "segment", MAX)
    reader = FilesCursor(spec, "r", None, max_bytes=MAX)
    events.clear()
    stream = "streams/actor/0/0"
    appender.append(bytes(60))
    appender.append(bytes(60))
    reader.read(0)
    reader.sync()
    reader.commit(2)
    assert events == [
        f"sync {stream}",
        f"sync {stream}/{0:020d}.log",
        *(f"sync {stream}/readers/.r.{os.getpid()}", "rename r", f"sync {stream}/readers"),
    ]
    events.clear()
    appender.append(b"begins a segment")
    assert events == [
        f"sync {stream}/{0:020d}.log",
        f"sync {stream}",
        *(f"sync {stream}/readers", f"delete {0:020d}.log"),
    ]
    appender.close()
    reader.close()


def test_random_damage_never_delivers_a_wrong_record(
    spec: SingleStreamSpec, written: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    rng = random.Random(3)
    for _ in range(1000):
        damaged = bytearray(written)
        start = rng.randrange(len(damaged))
        damaged[start : start + rng.randrange(30)] = rng.choice((rng.randbytes(rng.randrange(30)), bytes(20)))
        segment(spec).write_bytes(damaged)
        delivered, _ = read(spec)
        assert delivered == PAYLOADS[: len(delivered)]


def test_last_is_none_when_the_newest_record_was_lost_behind_every_reader(spec: SingleStreamSpec):
    write(spec, [bytes(60)] * 5, segment_bytes=100)  # segments 0, 2 and 4
    commit(spec, "r", 5)
    segment(spec, 2).unlink()  # a cut may keep this deletion and lose the one of segment 0, which came before it
    segment(spec, 4).write_bytes(MAGIC)
    appender = open_appender(spec)
    assert (appender.last(), appender.next_offset) == (None, 5)
    appender.append(b"after")
    assert appender.last() == b"after"
    appender.close()


@pytest.mark.parametrize("torn", [b"", MAGIC[:1], MAGIC[:-1]])
def test_segment_whose_beginning_is_torn_was_not_written_yet(spec: SingleStreamSpec, torn: bytes):
    write(spec, [bytes(60)] * 2, segment_bytes=100)
    segment(spec, 2).write_bytes(torn + bytes(4096))
    assert read(spec) == ([bytes(60)] * 2, None)
    write(spec, [b"after"])
    assert read(spec) == ([bytes(60)] * 2 + [b"after"], None)


def test_zeros_at_the_end_are_cut_off_like_a_torn_frame(spec: SingleStreamSpec, written: bytes):
    segment(spec).write_bytes(written + bytes(5000))
    assert read(spec) == (PAYLOADS, None)
    write(spec, [b"after"])
    assert read(spec) == ([*PAYLOADS, b"after"], None)


def test_record_larger_than_one_read_and_its_torn_form(spec: SingleStreamSpec):
    backend = FilesBackend(fsync="never")
    large = random.Random(0).randbytes(9 << 20)
    appender = backend.open_appender(spec)
    for payload in (b"small", large, b"behind"):
        appender.append(payload)
    assert appender.last() == b"behind"
    appender.close()
    cursor = backend.open_cursor(spec, "r", None)
    payloads = [bytes(payload) for _ in range(3) for _, payload in cursor.read(0)]
    assert payloads == [b"small", large, b"behind"]
    cursor.close()
    os.truncate(segment(spec), 5 << 20)
    assert [bytes(payload) for _, payload in backend.open_cursor(spec, None, None).read(0)] == [b"small"]
    appender = backend.open_appender(spec)
    assert (appender.next_offset, appender.last()) == (1, b"small")
    appender.close()


def test_segments_follow_each_other_and_are_deleted_behind_every_reader(spec: SingleStreamSpec):
    fast, slow = (FilesCursor(spec, name, None, max_bytes=MAX) for name in ("fast", "slow"))
    appender = open_appender(spec, segment_bytes=100)
    payloads = [b"%03d" % number + bytes(57) for number in range(8)]  # two per segment
    for payload in payloads[:5]:
        appender.append(payload)
    assert segment_bases(spec.path) == [0, 2, 4]
    assert [bytes(p) for _ in range(3) for _, p in fast.read(0)] == payloads[:5]
    fast.commit(5)
    slow.commit(3)
    for payload in payloads[5:]:
        appender.append(payload)
    assert segment_bases(spec.path) == [2, 4, 6], "records 2 and 3 share a segment, and slow has not passed 3"
    with pytest.raises(StreamError, match=says("record 1", 2)):
        FilesCursor(spec, "late", 1, max_bytes=MAX)
    fast.commit(8)
    slow.commit(8)
    appender.append(b"last")
    assert segment_bases(spec.path) == [8], "the newest record stays though everybody has passed it"
    appender.close()
    fast.close()
    slow.close()
    appender = open_appender(spec)
    assert (appender.last(), appender.next_offset) == (b"last", 9)
    appender.close()


def test_missing_and_shortened_segments_are_errors_not_silence(spec: SingleStreamSpec):
    write(spec, [bytes(60)] * 6, segment_bytes=100)
    os.truncate(segment(spec, 2), 100)
    delivered, error = read(spec)
    assert len(delivered) == 3
    assert "records 3 to 3 are missing" in str(error)
    segment(spec, 2).unlink()
    delivered, error = read(spec)
    assert len(delivered) == 2
    assert "records 2 to 3 are missing" in str(error)


def test_empty_last_segment_behind_a_shortened_one_is_refused(spec: SingleStreamSpec):
    write(spec, [bytes(60)] * 4, segment_bytes=100)
    os.truncate(segment(spec, 2), 8)
    segment(spec, 2).rename(segment(spec, 4))
    commit(spec, "slow", 0)
    with pytest.raises(CorruptStreamError, match=says("record 2", 4, "reader slow")):
        open_appender(spec)


def test_writer_killed_before_the_first_record_of_a_segment_is_continued(spec: SingleStreamSpec):
    write(spec, [bytes(60)] * 2, segment_bytes=100)
    segment(spec, 2).write_bytes(b"PRLL")
    appender = open_appender(spec)
    assert (appender.next_offset, appender.last()) == (2, bytes(60))
    appender.append(b"third")
    appender.close()
    assert read(spec) == ([bytes(60), bytes(60), b"third"], None)


WRITER = """
    import sys
    from pipelinerl.streams import SingleStreamSpec
    from pipelinerl.streams.files import FilesAppender
    appender = FilesAppender(SingleStreamSpec(sys.argv[1], "actor"), 200_000, "never", 1 << 20)
    print("open", flush=True)
    while True:
        appender.append(b"%d " % appender.next_offset + bytes(appender.next_offset * 7919 % 20_000))
"""


def test_killed_writers_lose_and_double_nothing_that_a_live_reader_sees(spec: SingleStreamSpec):
    rng = random.Random(11)
    cursor = FilesCursor(spec, "live", None, max_bytes=MAX)
    seen: list[int] = []
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            for offset, payload in cursor.read(0.05):
                assert bytes(payload) == b"%d " % offset + bytes(offset * 7919 % 20_000)
                seen.append(offset)
            cursor.commit(len(seen))

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        for _ in range(5):
            command = [sys.executable, "-c", textwrap.dedent(WRITER), str(spec.exp_path)]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"open\n"
                target = len(seen) + rng.randrange(50, 400)
                wait_until(lambda target=target: len(seen) >= target or not reader.is_alive())
                process.send_signal(signal.SIGKILL)
        appender = open_appender(spec)
        wait_until(lambda: len(seen) == appender.next_offset or not reader.is_alive())
        appender.close()
    finally:
        stop.set()
        reader.join()
        cursor.close()
    assert seen == list(range(appender.next_offset))
    assert len(segment_bases(spec.path)) < len(seen) * 10_000 / 200_000, "passed segments are deleted"
