"""Where updates are staged, and that page-locked memory is taken as it is asked for."""

import os
import subprocess
import sys

from pipelinerl.weights.staging_memory import fits_on_device, reserve_bytes

GIB = 1 << 30
NCCL_BYTES = 3 * 4 * 16_000_000
"""Three communicators of four channels."""
SETTINGS = """
import torch
from pipelinerl.weights.pinned import pin_exactly
pin_exactly()
pin_exactly()
print(torch._C._accelerator_getAllocatorSettings())
"""


def settings(environment: str) -> str:
    env = os.environ | {"PYTORCH_ALLOC_CONF": environment, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SETTINGS], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_staging_leaves_room_for_communicators_that_come_after_it() -> None:
    assert [reserve_bytes(kind) for kind in ("tcp", "ipc", "nccl")] == [GIB, GIB, GIB + NCCL_BYTES]
    assert fits_on_device(7 * GIB - NCCL_BYTES, 8 * GIB, "nccl")
    assert not fits_on_device(7 * GIB - NCCL_BYTES + 1, 8 * GIB, "nccl")
    assert fits_on_device(7 * GIB, 8 * GIB, "ipc")


def test_pinned_memory_is_not_rounded_and_what_the_environment_sets_stays() -> None:
    """torch rounds allocations up to this size to a power of two."""
    assert settings("") == "pinned_max_round_threshold_mb:1"
    assert settings("garbage_collection_threshold:0.8") == (
        "garbage_collection_threshold:0.8,pinned_max_round_threshold_mb:1"
    )
    assert settings("pinned_max_round_threshold_mb:64") == "pinned_max_round_threshold_mb:64"
