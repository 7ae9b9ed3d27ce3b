"""Streams as files: one folder per stream, which holds the records in segments and the readers' positions.

    <run>/streams/<topic>/<instance>/<partition>/
        00000000000000000000.log    magic, then frames. The name is the offset of the first record
        readers/<name>              durable position of a named reader, in digits
        writer.lock                 held (flock) by the only writer, with its process id and host

Only the newest segment grows. A writer killed during a write leaves an incomplete last frame, which readers treat as
not yet written and the next writer cuts off. Segments below every named reader's position are deleted. Damage is an
error if a named reader has yet to read the records, else it is skipped with a warning.
"""

from pipelinerl.streams.files.appender import FilesAppender
from pipelinerl.streams.files.backend import FilesBackend
from pipelinerl.streams.files.cursor import FilesCursor

__all__ = ["FilesAppender", "FilesBackend", "FilesCursor"]
