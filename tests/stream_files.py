"""Writes and reads a topic in files, one record at a time."""

from pipelinerl.errors import StreamError
from pipelinerl.streams import SingleStreamSpec
from pipelinerl.streams.files import FilesAppender, FilesCursor

MAX = 1 << 20


def open_appender(spec: SingleStreamSpec, segment_bytes: int = MAX) -> FilesAppender:
    return FilesAppender(spec, segment_bytes, "never", MAX)


def write(spec: SingleStreamSpec, payloads: list[bytes], segment_bytes: int = MAX) -> None:
    appender = open_appender(spec, segment_bytes)
    for payload in payloads:
        appender.append(payload)
    appender.close()


def read(spec: SingleStreamSpec) -> tuple[list[bytes], StreamError | None]:
    """What a reader delivers, and the error that ends it if there is one."""
    delivered: list[bytes] = []
    try:
        cursor = FilesCursor(spec, None, None, max_bytes=MAX)
    except StreamError as error:
        return delivered, error
    try:
        while records := cursor.read(0):
            assert [offset for offset, _ in records] == list(range(len(delivered), len(delivered) + len(records)))
            delivered += [bytes(payload) for _, payload in records]
    except StreamError as error:
        return delivered, error
    finally:
        cursor.close()
    return delivered, None
