"""Where a server's worker stages an update: on its device if that leaves enough, else in page-locked host memory. Pure.

The first update is staged before the worker's communicators exist, so their memory is left free. The plan of a run
decides in the same way.
"""

from pipelinerl.config.backends import TransportName

WHOLE_BYTES = 32 << 30
"""If a server's loaders cannot be traced, every worker holds the whole version, up to this size."""
RESERVE_BYTES = 1 << 30
"""Device memory that staging leaves free in any case."""
CHANNELS = 4
"""NCCL takes up to 32 for a communicator, each with buffers. Sending between two members needs no more than a few."""
COMMUNICATORS = 3
"""A worker's communicators of NCCL: with the trainer's ranks, to a server, from a server."""
COMMUNICATOR_BYTES = CHANNELS * 16_000_000
"""Device memory of one: 0.4 to 0.5 GB at 32 channels on A100 and H100, as published."""


def reserve_bytes(transport: TransportName) -> int:
    """Returns the device memory that staging leaves free."""
    return RESERVE_BYTES + (COMMUNICATORS * COMMUNICATOR_BYTES if transport == "nccl" else 0)


def fits_on_device(num_bytes: int, free: int, transport: TransportName) -> bool:
    """Whether ``num_bytes`` are staged on a device that has ``free`` bytes beside the model and its cache."""
    return free >= num_bytes + reserve_bytes(transport)
