"""Topics: append-only streams of records between roles, stored in files, on redis, or on a backend of your own.

``codec`` encodes a record as msgpack with raw arrays, and ``frames`` adds a length and checksums. A backend stores the
frame (``base`` lists what every backend guarantees). Named readers read the records and have durable positions.

    python -m pipelinerl.streams tail results/x actor     records as JSON
    python -m pipelinerl.streams stats results/x          topics, lengths, positions, bytes
    python -m pipelinerl.streams verify results/x         damage, and the readers it affects
"""

from pipelinerl.streams.api import (
    StreamReader,
    StreamWriter,
    TopicReader,
    TopicWriter,
    backend_from_config,
    get_streams_backend,
    open_reader,
    open_writer,
    read_stream,
    set_streams_backend,
    write_to_streams,
)
from pipelinerl.streams.base import StreamStats
from pipelinerl.streams.spec import SingleStreamSpec, StreamRangeSpec, StreamSpec, run_key

__all__ = [
    "SingleStreamSpec",
    "StreamRangeSpec",
    "StreamReader",
    "StreamSpec",
    "StreamStats",
    "StreamWriter",
    "TopicReader",
    "TopicWriter",
    "backend_from_config",
    "get_streams_backend",
    "open_reader",
    "open_writer",
    "read_stream",
    "run_key",
    "set_streams_backend",
    "write_to_streams",
]
