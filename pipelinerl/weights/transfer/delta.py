"""Lossless delta of two flat buffers: the changed 16-bit words and their places in chunks of 65,536 words.

    payload = counts int32 [chunks] | places uint16 [changed] | values uint16 [changed]

In bf16 a step at a learning rate around 1e-6 changes few words, because most updates round to zero.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

CHUNK_BITS = 16  # so that a place in a chunk is a uint16
CHUNK_WORDS = 1 << CHUNK_BITS
SEGMENT_WORDS = 16 * CHUNK_WORDS
"""Words that a thread compares at a time, so that what lies between its steps stays in the cache."""


def encode_delta(base: torch.Tensor, new: torch.Tensor, threads: int = 1) -> torch.Tensor | None:
    """Returns the payload that turns ``base`` into ``new``, None if dense is not larger.

    Args:
        base, new: uint8 in host memory, of the same even length.
    """
    old, words = (buffer.numpy().view(np.uint16) for buffer in (base, new))
    left = new.numel() - 4 * _num_chunks(len(words))
    parts = []
    with ThreadPoolExecutor(threads) as pool:
        for part in pool.map(lambda start: _encode_segment(old, words, start), range(0, len(words), SEGMENT_WORDS)):
            left -= 4 * len(part[1])
            if left <= 0:
                pool.shutdown(wait=False, cancel_futures=True)
                return None
            parts.append(part)
    if not parts:
        return None
    return torch.from_numpy(
        np.concatenate([array.view(np.uint8) for kind in zip(*parts, strict=True) for array in kind])
    )


def _encode_segment(old: np.ndarray, new: np.ndarray, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (changed words of each chunk, their places in it, their values) from word ``start`` on."""
    old, new = old[start : start + SEGMENT_WORDS], new[start : start + SEGMENT_WORDS]
    changed = np.flatnonzero(old != new)
    edges = np.searchsorted(changed, np.arange(_num_chunks(len(new)) + 1) << CHUNK_BITS)
    return np.diff(edges).astype(np.int32), changed.astype(np.uint16), new[changed]


def apply_delta(buffer: torch.Tensor, payload: torch.Tensor) -> None:
    """Applies the delta in place to ``buffer``, which holds the base. Raises ``ValueError`` for a malformed payload."""
    words = buffer.view(torch.int16)
    places, values = changed_words(payload, words.numel())
    words[places.to(words.device)] = values.to(words.device)


def changed_words(payload: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places of the changed words in a buffer of ``num_words``, rising, and their values (int64, int16).

    Raises ``ValueError`` for a malformed payload.
    """
    num_chunks = _num_chunks(num_words)
    counts = payload[: 4 * num_chunks].view(torch.int32).long()
    body = payload[4 * num_chunks :].view(torch.int16)
    changed = body.numel() // 2
    if int(counts.sum()) != changed:
        raise ValueError(f"delta payload announces {int(counts.sum())} changed words and carries {changed}")
    chunk = torch.repeat_interleave(torch.arange(num_chunks), counts)
    places = (chunk << CHUNK_BITS) | (body[:changed].long() & (CHUNK_WORDS - 1))
    return places, body[changed:]


def _num_chunks(num_words: int) -> int:
    return -(-num_words // CHUNK_WORDS)
