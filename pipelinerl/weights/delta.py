"""Lossless delta of two flat buffers: the changed 16-bit words and their places.

In bf16 a step at a learning rate around 1e-6 changes few words, because most updates round to zero. The encoding holds
the number of changed words of every chunk of 65,536 words. Each changed word takes 4 bytes: its 16-bit place in the
chunk and its new value. Applying the delta to the base gives exactly the new buffer.

    payload = counts int32 [chunks] | places uint16 [changed] | values uint16 [changed]
"""

import torch

CHUNK_BITS = 16
CHUNK_WORDS = 1 << CHUNK_BITS


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Returns the payload that turns ``base`` into ``new`` (uint8, same even length), None if dense is not larger."""
    base_words, new_words = base.view(torch.int16), new.view(torch.int16)
    places = (base_words != new_words).nonzero().flatten()
    counts = torch.bincount(places >> CHUNK_BITS, minlength=_num_chunks(new_words.numel())).to(torch.int32)
    if counts.numel() * 4 + places.numel() * 4 >= new.numel():
        return None
    return torch.cat(
        (
            counts.view(torch.uint8),
            (places & (CHUNK_WORDS - 1)).to(torch.int16).view(torch.uint8),
            new_words[places].view(torch.uint8),
        )
    )


def apply_delta(buffer: torch.Tensor, payload: torch.Tensor) -> None:
    """Applies the delta in place to ``buffer``, which holds the base. Raises ``ValueError`` for a malformed payload."""
    words = buffer.view(torch.int16)
    num_chunks = _num_chunks(words.numel())
    counts = payload[: 4 * num_chunks].view(torch.int32).long()
    body = payload[4 * num_chunks :].view(torch.int16)
    changed = body.numel() // 2
    if int(counts.sum()) != changed:
        raise ValueError(f"delta payload announces {int(counts.sum())} changed words and carries {changed}")
    chunk = torch.repeat_interleave(torch.arange(num_chunks), counts)
    places = (chunk << CHUNK_BITS) | (body[:changed].long() & (CHUNK_WORDS - 1))
    words[places.to(words.device)] = body[changed:].to(words.device)


def _num_chunks(num_words: int) -> int:
    return -(-num_words // CHUNK_WORDS)
