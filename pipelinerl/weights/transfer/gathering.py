"""Bytes and checksums of a worker's shard, out of an item that has all bytes of a version or of a stripe."""

import threading
from collections.abc import Sequence

import torch

from pipelinerl.weights.protocol import Runs, Sum, Summed
from pipelinerl.weights.transfer.buffers import BufferRegistry, Item, WithdrawnError
from pipelinerl.weights.transfer.checksum import ROW_BYTES, added, checksum
from pipelinerl.weights.transfer.shard import end_of, gather_runs
from pipelinerl.weights.transfer.wire import WireError

PIECE_BYTES = 1024 * ROW_BYTES
"""A checksum is computed in pieces of this size, so that it never holds up the next version."""
REMEMBERED = 256


def gathered(item: Item, runs: Sequence[Runs], start: int, end: int) -> torch.Tensor:
    """Returns bytes ``start`` … ``end`` of a shard.

    Raises:
        WireError: the runs do not have these bytes.
    """
    if not runs or not runs[0].place <= start < end <= end_of(runs):
        raise WireError(f"bytes {start} to {end} of a shard were asked for with {len(runs)} runs")
    try:
        return gather_runs(runs, item.buffer, item.first, start, end)
    except ValueError as error:
        raise WireError(str(error)) from error


class Sums:
    """Checksums of what the servers' workers keep. Many servers ask for the same one, so it is computed once."""

    def __init__(self, registry: BufferRegistry):
        self._registry = registry
        self._lock = threading.Lock()
        self._known: dict[Sum, str] = {}

    def interrupt(self) -> None:
        """Does nothing: it reads a piece at a time, and the owner of the bytes waits for that."""

    def answer(self, question: Sum) -> Summed:
        """Returns the checksum. Empty if the version is not here, or is withdrawn before the end."""
        item = self._registry.find(question.key)
        if item is None or not item.is_whole:
            return Summed(checksum="")
        with self._lock:
            if question not in self._known:
                for old in list(self._known)[: 1 - REMEMBERED]:
                    del self._known[old]
                self._known[question] = self._sum(item, question.runs)
            return Summed(checksum=self._known[question])

    def _sum(self, item: Item, runs: Sequence[Runs]) -> str:
        first, end, digests = runs[0].place if runs else 0, end_of(runs), [checksum(item.buffer[:0])]
        for start in range(first, end, PIECE_BYTES):
            try:
                with self._registry.reading(item, self):
                    piece = gathered(item, runs, start, min(start + PIECE_BYTES, end))
            except WithdrawnError:
                return ""
            digests.append(checksum(piece, start - first))
        return added(digests)
