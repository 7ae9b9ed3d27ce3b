"""The short names that the configuration takes for stream backends, training engines and weight bucket transports.

To add a stream backend or an engine, write its class and add a line to `STREAM_BACKENDS` or `ENGINES`. To add a
bucket transport, add its name to `TransportName` and its class to `pipelinerl.weights.transfer.bucket.TRANSPORTS`.
"""

from typing import Literal

STREAM_BACKENDS = {
    "files": "pipelinerl.streams.files.FilesBackend",
    "redis": "pipelinerl.streams.redis.RedisBackend",
}
"""Stream backends by `streams.backend`. A class is imported only when it is chosen. It gets `streams.options`."""
WITH_KEYS_OF_THEIR_OWN = ("files", "redis")
"""Stream backends whose settings are keys of section `streams` instead of `streams.options`."""

ENGINES = {
    "ddp": "pipelinerl.finetune.engines.replicated.ReplicatedEngine",
    "deepspeed": "pipelinerl.finetune.engines.zero.ZeroEngine",
    "fsdp2": "pipelinerl.finetune.engines.sharded.ShardedEngine",
}
"""Training engines by `finetune.engine`. A class is imported only when it is chosen."""

DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"
STREAM_BACKEND_PATTERN = rf"^({'|'.join(STREAM_BACKENDS)}|{DOTTED})$"
ENGINE_PATTERN = rf"^(auto|{'|'.join(ENGINES)}|{DOTTED})$"
"""A short name, or the dotted name of a class."""

TransportName = Literal["nccl", "ipc", "tcp"]
"""How weights travel from one process to the next, by `weights.backend`."""
