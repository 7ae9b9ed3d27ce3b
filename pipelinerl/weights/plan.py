"""How the next version is taken: which buffers stay, and whether it is encoded as a difference. Equal on all ranks."""

from dataclasses import dataclass
from typing import Literal

RETRY = 64
"""Every so many versions the slower way is measured again."""
WARM_UPS = 1
"""The first whole update also connects and allocates, so it is not measured."""

DeltaMode = Literal["auto"] | bool


@dataclass(frozen=True, kw_only=True)
class TakePlan:
    """Decided by rank 0 for all ranks."""

    kept: int | None = None
    """A version that servers still pull. None = there is none."""
    is_delta: bool = False
    """Encode the difference from the version before."""


class DeltaChoice:
    """Decides which versions are encoded. ``auto`` takes the way that was faster when it was last measured."""

    def __init__(self, mode: DeltaMode):
        self._mode = mode
        self._count = 0
        self._whole_s: float | None = None
        self._delta_s: float | None = None

    def next(self) -> bool:
        """Whether the next version is encoded."""
        if self._mode != "auto":
            return self._mode is True
        self._count += 1
        if self._whole_s is None or self._delta_s is None:
            return self._whole_s is not None
        is_faster = self._delta_s < self._whole_s
        return is_faster != (self._count % RETRY == 0)

    def measured(self, seconds: float, *, is_delta: bool) -> None:
        """Records how long the servers waited for a version. Encoding counts."""
        if is_delta:
            self._delta_s = seconds
        elif self._count > WARM_UPS:
            self._whole_s = seconds
