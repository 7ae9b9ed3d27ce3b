"""Topics: append-only streams of records between roles, on files, on redis, or on a backend of your own.

A record is framed and checksummed (``frames``), msgpack with raw arrays inside (``codec``), stored by a backend
(``base`` says what every backend guarantees) and read by named readers whose positions are durable.

    python -m pipelinerl.streams tail results/x actor     records as JSON
    python -m pipelinerl.streams stats results/x          topics, lengths, positions, bytes
    python -m pipelinerl.streams verify results/x         damage, and whom it matters to
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
