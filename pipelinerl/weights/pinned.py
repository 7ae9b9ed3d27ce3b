"""Page-locked host memory that takes just as many bytes as were asked for."""

import torch

_KEY = "pinned_max_round_threshold_mb"


def pinned(num_bytes: int) -> torch.Tensor:
    """Returns zeros, flat uint8, that a GPU reads and writes directly."""
    pin_exactly()
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def pin_exactly() -> None:
    """Has torch take page-locked memory of more than 1 MiB as it is asked for, in this process.

    What the environment sets stays. torch 2.11 cannot be told, and rounds.
    """
    settings_now = getattr(torch._C, "_accelerator_getAllocatorSettings", None)  # noqa: SLF001 — no public way at run time
    if settings_now is not None and _KEY not in (settings := settings_now()):
        # By default each allocation is rounded up to a power of two: 17 GiB take 32.
        exact = f"{_KEY}:1"
        torch._C._accelerator_setAllocatorSettings(f"{settings},{exact}" if settings else exact)  # noqa: SLF001 — as above
