"""Streams as files: one folder per stream, records in segments, readers' positions beside them.

    <run>/streams/<topic>/<instance>/<partition>/
        00000000000000000000.log    magic, then frames; the name is the offset of its first record
        readers/<name>              durable position of a named reader, in digits
        writer.lock                 held (flock) by the one writer, with its process id and host

Only the newest segment grows. A writer killed in mid-write leaves an incomplete last frame, which the next writer cuts
off and readers take for "not yet written"; bytes that fail a checksum are an error for both. Segments below every named
reader's position are deleted by the writer when it begins a new one; without a named reader nothing is deleted.

``fsync``: ``never`` leaves writing back to the kernel (a killed process loses nothing, a power cut may). ``segment``
syncs a segment when it is full or closed, and before anything points behind its records: a position, a record of
another stream (``barrier``), a checkpoint (``sync``). A power cut then costs ends of streams that nothing refers to.
``always`` syncs every record before ``append`` returns.

Damage is an error where a named reader has yet to read. Below every named reader's position it is passed over with a
warning, be it a flipped bit or a deleted segment; so it is for readers that want the newest records only.

A waiting reader sleeps until the kernel reports a write in the folder (``wakeup``).
"""

from pipelinerl.streams.files.appender import FilesAppender
from pipelinerl.streams.files.backend import FilesBackend
from pipelinerl.streams.files.cursor import FilesCursor

__all__ = ["FilesAppender", "FilesBackend", "FilesCursor"]
