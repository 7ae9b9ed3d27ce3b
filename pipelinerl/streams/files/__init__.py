"""Streams as files: one folder per stream, which holds the records in segments and the readers' positions.

    <run>/streams/<topic>/<instance>/<partition>/
        00000000000000000000.log    magic, then frames. The name is the offset of the first record
        readers/<name>              durable position of a named reader, in digits
        writer.lock                 held (flock) by the only writer, with its process id and host

Only the newest segment grows. A writer killed during a write leaves an incomplete last frame. The next writer cuts it
off, and readers treat it as not yet written. Bytes that fail a checksum are an error for both. When the writer begins a
new segment, it deletes the segments below every named reader's position. Without a named reader it deletes none.

What a power cut may take depends on ``fsync``: ``never``: any record that the kernel had not written. ``segment``:
records at the end of streams that nothing refers to, since a segment is synced when it is full or closed, and before a
position, a record of another stream (``barrier``) or a checkpoint (``sync``) refers to it. ``always``: none.

Damage is an error if a named reader has yet to read the records. Below that, and for readers that need only the newest
records, it is skipped with a warning.
"""

from pipelinerl.streams.files.appender import FilesAppender
from pipelinerl.streams.files.backend import FilesBackend
from pipelinerl.streams.files.cursor import FilesCursor

__all__ = ["FilesAppender", "FilesBackend", "FilesCursor"]
