"""The checksum of a version's bytes: of a stripe, of the whole as the sum of its stripes', and of a worker's shard."""

import threading
from collections.abc import Iterable, Sequence

import torch

from pipelinerl.weights.protocol import Runs, Sum, Summed
from pipelinerl.weights.transfer.buffers import BufferRegistry, Item, WithdrawnError
from pipelinerl.weights.transfer.shard import end_of, gather_runs

WIDTH = 1024
"""Words in a row of the checksum's matrix."""
ROW_BYTES = 8 * WIDTH
CPU_ROWS, GPU_ROWS = 64, 1 << 14
"""Rows per step. Those of the CPU fit into its cache."""
PIECE_BYTES = 1024 * ROW_BYTES
"""A shard's checksum is computed in pieces of this size, so that it never holds up the next version."""
REMEMBERED = 256
"""Checksums that are kept: those of all shards of two versions, also of 64 workers and two stripes."""


def checksum(buffer: torch.Tensor, first: int = 0) -> str:
    """Returns the hexadecimal digest of a flat uint8 tensor whose length is a multiple of 8.

    The 64-bit words are the rows of a matrix of width 1024, the last one filled with zeros. The digest is the sum of
    the words times their row (from 1) and of the words times their column (from 1), modulo 2⁶⁴. So the digest of a
    whole is the sum of its stripes' digests (``added``).

    Args:
        first: place of the first byte in the whole, a multiple of ``ROW_BYTES``.
    """
    words = buffer.view(torch.int64)
    whole = len(words) // WIDTH * WIDTH
    parts = list(words[:whole].view(-1, WIDTH).split(GPU_ROWS if buffer.is_cuda else CPU_ROWS))
    if whole < len(words):
        parts.append(torch.nn.functional.pad(words[whole:], (0, whole + WIDTH - len(words)))[None])
    columns = torch.zeros(WIDTH, dtype=torch.int64, device=buffer.device)
    row_sums = [columns[:0]]
    for part in parts:
        row_sums.append(part.sum(1))
        columns += part.sum(0)
    rows = torch.cat(row_sums)
    by_row = int((rows * _places(rows, 1 + first // ROW_BYTES)).sum())
    by_column = int((columns * _places(columns, 1)).sum())
    return "".join(f"{total % 2**64:016x}" for total in (by_row, by_column))


def added(digests: Iterable[str]) -> str:
    """Returns the checksum of a whole from the checksums of its stripes."""
    halves = [(int(digest[:16], 16), int(digest[16:], 16)) for digest in digests]
    return "".join(f"{sum(column) % 2**64:016x}" for column in zip(*halves, strict=True))


def _places(sums: torch.Tensor, first: int) -> torch.Tensor:
    return torch.arange(first, first + len(sums), device=sums.device)


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
                    piece = gather_runs(runs, item.buffer, item.first, start, min(start + PIECE_BYTES, end))
            except WithdrawnError:
                return ""
            digests.append(checksum(piece, start - first))
        return added(digests)
