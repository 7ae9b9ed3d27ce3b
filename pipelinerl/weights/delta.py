"""Lossless delta of two flat buffers: the 16-bit words that changed, with their places.

In bf16 a step at a learning rate around 1e-6 changes few words, because most updates round to nothing. The encoding
holds, for every chunk of 65,536 words, how many changed, and for every changed word its 16-bit place in the chunk and
its new value: 4 bytes per changed word. Applying it to the base gives the new buffer bit for bit.

    payload = counts int32 [chunks] | places uint16 [changed] | values uint16 [changed]
"""

import torch

CHUNK_BITS = 16
CHUNK_WORDS = 1 << CHUNK_BITS


def encode_delta(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """The payload that turns ``base`` into ``new`` (uint8, equal even length); None when dense is smaller."""
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
    """Turn the base in ``buffer`` into the new version, in place."""
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
