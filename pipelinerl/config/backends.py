"""The short names that the configuration takes for stream backends and weight carriages.

To add a stream backend, write its class and add a line to `STREAM_BACKENDS`. To add a carriage, add its name to
`Carriage` and its class to `pipelinerl.weights.carriage.CARRIERS`.
"""

from typing import Literal

STREAM_BACKENDS = {
    "files": "pipelinerl.streams.files.FilesBackend",
    "redis": "pipelinerl.streams.redis.RedisBackend",
}
"""Stream backends by `streams.backend`. A class is imported only when it is chosen. It gets `streams.options`."""
WITH_KEYS_OF_THEIR_OWN = ("files", "redis")
"""Stream backends whose settings are keys of section `streams` instead of `streams.options`."""
STREAM_BACKEND_PATTERN = rf"^({'|'.join(STREAM_BACKENDS)}|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+)$"
"""A short name, or the dotted path of a class."""

Carriage = Literal["nccl", "ipc", "tcp"]
"""How weights travel from one process to the next, by `weights.backend`."""
