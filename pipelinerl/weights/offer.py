"""One version as the sender offers it to the servers: where its bytes are, and who still pulls them."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import Description


@dataclass(eq=False)
class Offer:
    """A version and the servers that were ready when it arrived. Its bytes must not change while the offer is open.

    The offer closes ``stall_s`` after the first server has the version, so it does not wait for slow servers.
    """

    version: int
    layout: Layout
    stripes: tuple[tuple[int, int], ...]
    """(start, end) of each sending rank's share of the version."""
    base_version: int | None = None
    """Delta mode: the previous version."""
    deltas: tuple[tuple[int, int], ...] | None = None
    """The encoded differences from it. Each lies at the start of its stripe. None = there are none, or not yet."""
    encode_s: float = 0.0
    """Seconds that the servers waited for the deltas."""
    descriptions: "Future[list[Description]] | None" = None
    """What the ranks say about their stripes. None = it is not needed."""
    users: set[str] = field(default_factory=set)
    """Servers that pull it."""
    _pending: set[str] | None = None
    """None until the version has been offered to the servers."""
    _first: float | None = None

    def take_deltas(self, described: Sequence[Description]) -> None:
        """Records the deltas of all stripes. If one of them has none, the whole version is sent."""
        self.encode_s = max((description.encode_s for description in described), default=0.0)
        lengths = [description.delta_bytes for description in described if description.delta_bytes is not None]
        if len(lengths) == len(self.stripes):
            self.deltas = tuple((start, start + size) for (start, _), size in zip(self.stripes, lengths, strict=True))

    def ranges(self, base_version: int | None) -> tuple[tuple[int, int], ...]:
        """Returns where each rank's bytes lie, of the whole version or of its difference from ``base_version``."""
        if base_version is None:
            return self.stripes
        assert self.deltas is not None
        assert self.base_version == base_version
        return self.deltas

    @property
    def is_new(self) -> bool:
        return self._pending is None

    def start(self, names: Iterable[str]) -> None:
        self._pending = set(names)

    def reopen(self) -> None:
        """Makes the offer a new one, because its version must be delivered again."""
        self._pending = self._first = None

    def end(self, name: str, *, is_served: bool) -> None:
        """Records that a server has the version (``is_served``) or will not get it."""
        self.users.discard(name)
        if self._pending is not None:
            self._pending.discard(name)
        if is_served and self._first is None:
            self._first = time.monotonic()

    def is_open(self, stall_s: float) -> bool:
        return self._pending is None or (bool(self._pending) and not self.is_late(stall_s))

    def is_late(self, stall_s: float) -> bool:
        """Whether a server that ends now is more than ``stall_s`` later than the first."""
        return self._first is not None and time.monotonic() - self._first > stall_s
