"""The checksum of a version's bytes: of a stripe, and of the whole as the sum of its stripes' checksums."""

from collections.abc import Iterable

import torch

WIDTH = 1024
"""Words in a row of the checksum's matrix."""
ROW_BYTES = 8 * WIDTH
CPU_ROWS, GPU_ROWS = 64, 1 << 14
"""Rows per step. Those of the CPU fit into its cache."""


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
