"""The contract of streams, held to every backend: public names, bytes on disk, offsets, positions, one writer."""

import inspect
import json
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pipelinerl.streams as streams
from pipelinerl.config import load
from pipelinerl.config.backends import STREAM_BACKENDS
from pipelinerl.errors import ConfigError, CorruptStreamError, StreamError
from pipelinerl.records.topics import RETAINED_MB
from pipelinerl.streams import SingleStreamSpec, StreamRangeSpec, open_reader, open_writer, set_streams_backend
from tests.memory_streams import MemoryBackend
from tests.says import says


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    number: int
    values: np.ndarray | None = None


class Other(msgspec.Struct, frozen=True, kw_only=True, tag="other"):
    text: str


# The dotted path of another package's backend. docs/guides/stream-backend.md shows how to use it.
YOURS = os.environ.get("STREAM_BACKEND", "")


@pytest.fixture(params=["files", "memory", "redis", *filter(None, [YOURS])])
def backend(request: pytest.FixtureRequest, redis_options: dict[str, Any] | None) -> str:
    if request.param == YOURS:
        set_streams_backend(YOURS, **json.loads(os.environ.get("STREAM_OPTIONS", "{}")))
    elif request.param != "redis":
        set_streams_backend(MemoryBackend() if request.param == "memory" else request.param)
    elif redis_options is None:
        pytest.skip("redis-server 7 or newer is not installed")
    else:
        set_streams_backend("redis", **redis_options)
    return request.param


@pytest.fixture
def spec(tmp_path: Path) -> SingleStreamSpec:
    return SingleStreamSpec(tmp_path, "actor")


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def numbers(records: list[tuple[int, Note] | None]) -> list[tuple[int, int]]:
    return [(offset, record.number) for offset, record in filter(None, records)]


def test_public_names_are_those_of_the_design():
    assert set(streams.__all__) >= {
        "SingleStreamSpec",
        "StreamRangeSpec",
        "open_reader",
        "open_writer",
        "read_stream",
        "set_streams_backend",
        "write_to_streams",
        "backend_from_config",
    }
    assert parameters(streams.SingleStreamSpec) == [
        "exp_path",
        "topic",
        "instance",
        "partition",
    ]
    assert parameters(streams.StreamRangeSpec) == [
        "exp_path",
        "topic",
        "instance",
        "partition_range",
    ]
    assert parameters(streams.write_to_streams) == ["streams", "mode"]
    assert parameters(streams.read_stream) == ["stream"]
    assert parameters(streams.open_reader) == ["spec", "record_type", "name", "start", "over_damage"]
    assert parameters(streams.open_writer) == ["spec", "record_type"]


def test_write_then_poll_gives_the_records_with_their_offsets(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer, open_reader(spec, Note, name="r") as reader:
        assert reader.poll(0) == []
        assert [writer.write(Note(number=n)) for n in (5, 6, 7)] == [0, 1, 2]
        assert numbers(reader.poll(1)) == [(0, 5), (1, 6), (2, 7)]
        assert reader.position == 3
        assert reader.poll(0) == []


def test_arrays_survive_with_dtype_shape_and_their_own_memory(backend: str, spec: SingleStreamSpec):
    values = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    with open_writer(spec, Note) as writer, open_reader(spec, Note, name="r") as reader:
        writer.write(Note(number=0, values=values))
        ((_, note),) = reader.poll(1)
    assert note.values is not None
    np.testing.assert_array_equal(note.values, values)
    assert note.values.dtype == np.int32
    assert note.values.flags.writeable


def test_reader_opened_before_the_stream_exists_gets_its_first_record(backend: str, spec: SingleStreamSpec):
    with open_reader(spec, Note, name="early") as reader:
        assert reader.poll(0) == []
        with open_writer(spec, Note) as writer:
            writer.write(Note(number=1))
            assert numbers(reader.poll(5)) == [(0, 1)]


def test_poll_waits_for_a_record_written_meanwhile(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer, open_reader(spec, Note, name="r") as reader:
        timer = threading.Timer(0.05, writer.write, [Note(number=9)])
        timer.start()
        assert numbers(reader.poll(10)) == [(0, 9)]
        timer.join()


def test_reopened_writer_continues_behind_its_last_record(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer:
        assert writer.last() is None
        writer.write(Note(number=1))
        writer.write(Note(number=2))
    with open_writer(spec, Note) as writer:
        assert numbers([writer.last()]) == [(1, 2)]
        assert writer.write(Note(number=3)) == 2
        assert numbers([writer.last()]) == [(2, 3)]
    with open_reader(spec, Note, name=None) as reader:
        assert numbers(reader.read_all()) == [(0, 1), (1, 2), (2, 3)]


def test_named_reader_begins_at_its_durable_position_not_where_it_had_read_to(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer:
        for number in range(5):
            writer.write(Note(number=number))
    with open_reader(spec, Note, name="r") as reader:
        assert len(reader.poll(1)) == 5
        reader.commit(3)
        reader.commit(2)  # never moves back
    with open_reader(spec, Note, name="r") as reader:
        assert reader.position == 3
        assert numbers(reader.read_all()) == [(3, 3), (4, 4)]
    with open_reader(spec, Note, name="r", start=4) as reader:
        assert numbers(reader.read_all()) == [(4, 4)]
    with open_reader(spec, Note, name="other") as reader:
        assert reader.read_all()[0][1].number >= 0


def test_reader_without_a_name_cannot_commit(backend: str, spec: SingleStreamSpec):
    with open_reader(spec, Note, name=None) as reader, pytest.raises(StreamError, match="without a name"):
        reader.commit(0)


def test_reader_that_begins_beyond_the_end_is_refused(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer:
        writer.write(Note(number=0))
    with open_reader(spec, Note, name="r", start=1) as reader:
        assert reader.poll(0) == []
    with pytest.raises(StreamError, match="record 2"):
        open_reader(spec, Note, name="refused", start=2)
    assert streams.get_streams_backend().stats(spec).positions == {"r": 1}


def test_record_of_another_type_is_refused_by_writer_and_reader(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note | Other) as writer:
        with pytest.raises(StreamError, match=says("int", "Note | Other")):
            writer.write(3)
        writer.write(Other(text="x"))
    with open_reader(spec, Note, name="r") as reader, pytest.raises(StreamError, match=r"actor/0/0, record 0: .*Note"):
        reader.poll(1)


def test_stats_count_records_bytes_and_positions(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer, open_reader(spec, Note, name="r") as reader:
        for number in range(4):
            writer.write(Note(number=number))
        reader.commit(2)
        stats = streams.get_streams_backend().stats(spec)
        assert streams.get_streams_backend().specs(spec.exp_path) == [spec]
    assert (stats.next_offset, stats.positions) == (4, {"r": 2})
    assert 0 <= stats.first_offset <= 2
    assert stats.size_bytes > 0


def test_deleted_stream_begins_again_at_zero(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer:
        writer.write(Note(number=1))
    streams.get_streams_backend().delete(spec)
    assert streams.get_streams_backend().specs(spec.exp_path) == []
    with open_writer(spec, Note) as writer:
        assert writer.last() is None
        assert writer.write(Note(number=2)) == 0


def test_more_records_than_one_poll_gives_arrive_in_order(backend: str, spec: SingleStreamSpec):
    with open_writer(spec, Note) as writer, open_reader(spec, Note, name="r") as reader:
        for number in range(700):
            writer.write(Note(number=number))
        assert numbers(reader.read_all()) == [(number, number) for number in range(700)]


def test_second_writer_in_the_same_process_is_refused(spec: SingleStreamSpec):
    for backend in ("files", MemoryBackend()):
        set_streams_backend(backend)
        with open_writer(spec, Note), pytest.raises(StreamError, match="being written by"):
            open_writer(spec, Note)
        open_writer(spec, Note).close()


def test_plain_data_round_trip_and_turns_over_partitions(backend: str, tmp_path: Path):
    with streams.write_to_streams(StreamRangeSpec(tmp_path, "plain", partition_range=(1, 3))) as writer:
        writer.write({"a": 1})
        writer.write({"a": 2})
        writer.write({"a": 3}, partition=1)
        with pytest.raises(ValueError, match="0 to 1"):
            writer.write({}, partition=2)
    seen = {}
    for partition in (1, 2):
        with streams.read_stream(SingleStreamSpec(tmp_path, "plain", partition=partition)) as reader:
            records = reader.read()
            seen[partition] = [next(records) for _ in range(partition)]
    assert seen == {1: [{"a": 1}], 2: [{"a": 2}, {"a": 3}]}


def test_mode_w_begins_anew(backend: str, spec: SingleStreamSpec):
    for mode in ("a", "w"):
        with streams.write_to_streams(spec, mode=mode) as writer:
            writer.write(mode)
    with streams.read_stream(spec) as reader:
        assert next(reader.read()) == "w"


def test_files_wire_bytes_are_frozen(spec: SingleStreamSpec):
    set_streams_backend("files")
    with open_writer(spec, Note) as writer:
        writer.write(Note(number=1, values=np.array([7, -1], np.int32)))
    (segment,) = (spec.path).glob("*.log")
    assert segment.name == "00000000000000000000.log"
    payload = bytes.fromhex(
        "83 a474797065 a46e6f7465 a66e756d626572 01 a676616c756573 c70e01 0101 02000000 07000000 ffffffff"
    )
    fields = struct.pack("<IIQ", len(payload), zlib.crc32(payload), 0)
    assert segment.read_bytes() == b"PRLLOG1\n" + fields + struct.pack("<I", zlib.crc32(fields)) + payload


def test_specs_refuse_what_is_not_a_name():
    with pytest.raises(ConfigError, match="topic"):
        SingleStreamSpec(Path("x"), "../escape")
    with pytest.raises(ConfigError, match="partition"):
        SingleStreamSpec(Path("x"), "actor", partition=-1)
    with pytest.raises(ConfigError, match="partition_range"):
        StreamRangeSpec(Path("x"), "actor", partition_range=(2, 2))
    assert str(SingleStreamSpec("x", "actor", 1, 2)) == "actor/1/2"


def test_unknown_backend_and_option_are_refused():
    with pytest.raises(ConfigError, match=says("streams backend", "kafka", *STREAM_BACKENDS, "dotted path")):
        set_streams_backend("kafka")
    with pytest.raises(
        ConfigError, match=says("pipelinerl.streams.files.FilesCursor", "pipelinerl.streams.base.Backend")
    ):
        set_streams_backend("pipelinerl.streams.files.FilesCursor")
    with pytest.raises(ConfigError, match="segments"):
        set_streams_backend("files", segments=3)


def test_writer_that_is_gone_leaves_no_lock_with_its_forked_children(spec: SingleStreamSpec):
    set_streams_backend("files")
    writer = open_writer(spec, Note)
    ready, running = os.pipe()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(release)
        os.write(running, b"x")
        os.read(hold, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        os.close(writer._appender._lock._fd)  # type: ignore[attr-defined]  # what the kernel does when the writer is killed
        writer._appender._lock._fd = None  # type: ignore[attr-defined]
        open_writer(spec, Note).close()
    finally:
        for fd in (ready, running, hold, release):
            os.close(fd)
        os.waitpid(child, 0)


def test_files_position_that_is_not_a_number_is_an_error(spec: SingleStreamSpec):
    set_streams_backend("files")
    open_reader(spec, Note, name="r").close()
    for content in (b"", b"4\xff"):
        (spec.path / "readers" / "r").write_bytes(content)
        with pytest.raises(CorruptStreamError, match="is not a position"):
            open_reader(spec, Note, name="r")


@pytest.mark.parametrize("topic", ["trainer", "preprocessor", "actor_test"])
def test_topic_that_nobody_follows_keeps_its_newest_records_only(
    backend: str, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 records of 16 KB are 12.8 MB; 1 MB is to be kept, in segments of 1 MB."""
    if backend == "files":
        set_streams_backend("files", segment_mb=1)
    monkeypatch.setitem(RETAINED_MB, topic, 1)
    spec = SingleStreamSpec(tmp_path, topic)
    with open_writer(spec, Note) as writer:
        for number in range(800):
            writer.write(Note(number=number, values=np.zeros(2**14, np.uint8)))
    with open_reader(spec, Note, name=None) as reader:
        kept = reader.read_all()
    assert kept[-1][0] == 799
    assert 64 <= len(kept) <= 3 * 64
    assert kept[0][1].number == kept[0][0]


def test_backend_of_your_own_is_named_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_streams.py").write_text(
        "from tests.memory_streams import MemoryBackend\n\n\n"
        "class MyBackend(MemoryBackend):\n"
        "    def __init__(self, bucket: str):\n"
        "        super().__init__()\n"
        "        self.bucket = bucket\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    needed = [f"output_dir={tmp_path}", "actor.rollout_policy=a.b", "dataset_loader=a.b"]
    chosen = ["streams.backend=my_streams.MyBackend", "+streams.options.bucket=b"]
    streams.backend_from_config(load.parse(load.compose("base", [*needed, *chosen])), tmp_path)
    assert streams.get_streams_backend().bucket == "b"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="does not take these options"):
        streams.backend_from_config(load.parse(load.compose("base", [*needed, chosen[0]])), tmp_path)
    del sys.modules["my_streams"]
