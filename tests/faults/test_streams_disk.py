"""Topics in files on a full disk, and in a folder that became read-only."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from pipelinerl.errors import StreamError
from pipelinerl.streams import SingleStreamSpec
from pipelinerl.streams.files import FilesCursor
from tests.says import says
from tests.stream_files import MAX, open_appender, read, write

PAYLOADS = [b"first", b"", b"third record", b"4"]


def test_full_disk_is_a_clear_error_and_leaves_earlier_records_intact(small_disk: Path):
    spec = SingleStreamSpec(small_disk, "actor")
    appender = open_appender(spec)
    payload = bytes(range(256)) * 400
    count = 10
    for _ in range(count):
        appender.append(payload)
    with pytest.raises(StreamError, match=says("record 10", "102400 bytes", "No space left", "intact")):
        appender.append(payload)
    (small_disk / "other").write_bytes(b"")
    assert read(spec) == ([payload] * count, None)
    assert appender.append(b"small enough") == count, "a smaller record still fits"
    assert read(spec)[0][-1] == b"small enough"
    with pytest.raises(StreamError, match="No space left"):
        appender.append(payload)
    appender.close()
    appender = open_appender(spec)
    assert appender.next_offset == count + 1
    appender.close()


def test_full_disk_when_a_segment_begins_is_survived(small_disk: Path):
    spec = SingleStreamSpec(small_disk, "actor")
    appender = open_appender(spec, segment_bytes=1)
    appender.append(b"first")
    filler = small_disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(StreamError, match="No space left"):
        appender.append(b"second")
    filler.unlink()
    assert appender.append(b"second") == 1
    appender.close()
    assert read(spec) == ([b"first", b"second"], None)


def test_read_only_folder_is_a_clear_error_and_can_be_read(small_disk: Path):
    spec = SingleStreamSpec(small_disk, "actor")
    write(spec, PAYLOADS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StreamError, match=says("0/0", "Read-only file system", "writable")):
        open_appender(spec)
    with pytest.raises(StreamError, match="Read-only file system"):
        FilesCursor(spec, "named", None, max_bytes=MAX)
    assert read(spec) == (PAYLOADS, None)
