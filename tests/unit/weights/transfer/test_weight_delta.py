"""Delta mode is lossless: after every one of 100 small updates both ends hold the same bytes."""

import hashlib

import pytest
import torch

from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.transfer.delta import apply_delta, encode_delta
from tests.says import says


def sha256(buffer: torch.Tensor) -> str:
    return hashlib.sha256(buffer.numpy().tobytes()).hexdigest()


def test_delta_of_a_known_change_has_the_bytes_by_hand() -> None:
    base = torch.zeros(2 * 65_536 + 64, dtype=torch.uint8)  # 65,568 words: two chunks
    new = base.clone()
    new.view(torch.int16)[3] = 7
    new.view(torch.int16)[65_537] = -2
    payload = encode_delta(base, new)
    assert payload is not None
    assert payload[:8].view(torch.int32).tolist() == [1, 1]
    assert payload[8:].view(torch.int16).tolist() == [3, 1, 7, -2]
    apply_delta(base, payload)
    assert torch.equal(base, new)


def test_delta_at_the_end_of_a_chunk_survives_16_bit_places() -> None:
    base = torch.zeros(4 * 65_536, dtype=torch.uint8)
    new = base.clone()
    new.view(torch.int16)[torch.tensor([32_767, 32_768, 65_535, 65_536, 131_071])] = torch.arange(1, 6).to(torch.int16)
    payload = encode_delta(base, new)
    assert payload is not None
    apply_delta(base, payload)
    assert torch.equal(base, new)


def test_equal_buffers_give_a_payload_of_counts_only() -> None:
    base = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    payload = encode_delta(base, base.clone())
    assert payload is not None
    assert payload.numel() == 4 * 8


def test_dense_is_chosen_when_half_the_words_change() -> None:
    base = torch.zeros(1 << 20, dtype=torch.uint8)
    few, many = base.clone(), base.clone()
    few.view(torch.int16)[::3] = 1
    many.view(torch.int16)[::2] = 1
    assert encode_delta(base, few) is not None
    assert encode_delta(base, many) is None


def test_payload_with_a_wrong_count_is_refused() -> None:
    base = torch.zeros(1 << 18, dtype=torch.uint8)
    new = base.clone()
    new[0] = 1
    payload = encode_delta(base, new)
    assert payload is not None
    with pytest.raises(ValueError, match=says(1, 0, "words")):
        apply_delta(base, payload[:-4])


def test_hundred_adam_steps_in_bf16_keep_both_ends_bit_identical() -> None:
    torch.manual_seed(0)
    master = [torch.randn(100, 64) * 0.02, torch.randn(64) + 1.0, torch.randn(64, 100) * 0.02]
    optimizer = torch.optim.AdamW([p.requires_grad_() for p in master], lr=1e-6, weight_decay=0.0)
    names = ["a", "b", "c"]
    layout = Layout(tuple(spec_of(n, p.bfloat16()) for n, p in zip(names, master, strict=True)))
    trainer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, trainer).fill([(n, p.detach().bfloat16()) for n, p in zip(names, master, strict=True)])
    server, spare = trainer.clone(), torch.zeros_like(trainer)
    sent = 0
    for _ in range(100):
        for param in master:
            param.grad = torch.randn_like(param)
        optimizer.step()
        StripeBuffer(layout, spare).fill([(n, p.detach().bfloat16()) for n, p in zip(names, master, strict=True)])
        payload = encode_delta(trainer, spare)
        assert payload is not None
        apply_delta(server, payload)
        trainer, spare = spare, trainer
        sent += payload.numel()
        assert sha256(server) == sha256(trainer)
    assert 0 < sent < 100 * layout.num_bytes / 10
