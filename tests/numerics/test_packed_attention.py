"""Attention per document against a float64 oracle that writes the mask of all tokens by all tokens out."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pipelinerl.errors import ConfigError
from pipelinerl.finetune import attention
from pipelinerl.finetune.attention import announce, document_lengths, packed_attention

CPU = torch.device("cpu")
LENGTHS = (9, 1, 14, 14, 14, 9)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"sliding_window": 4},
    "softcap": {"softcap": 1.5},
    "sinks": {"s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {
        "scaling": 0.7,
        "sliding_window": 3,
        "softcap": 1.5,
        "s_aux": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64),
    },
}


def oracle(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """[1, L, H, D]. ``documents``: number of each token's document."""
    heads, length = query.shape[1], query.shape[2]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(length)
    distance = places[:, None] - places[None]
    seen = (documents[:, None] == documents[None]) & (distance >= 0)
    if sliding_window is not None:
        seen &= distance < sliding_window
    weights = scores.exp() * seen
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp()[None, :, None, None]
    return (weights / total @ value).transpose(1, 2)


@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_gradients_are_those_of_the_masked_softmax(name: str, block: int, monkeypatch: pytest.MonkeyPatch):
    """Four query heads over two key heads; values are narrower than keys, as in multi-head latent attention."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    total = sum(LENGTHS)
    shapes = [(1, 4, total, 8), (1, 2, total, 8), (1, 2, total, 6)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(1, total, 4, 6, dtype=torch.float64)
    documents = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    announce(LENGTHS, CPU)
    ours, _ = packed_attention(torch.nn.Identity(), *inputs, None, **OPTIONS[name])  # type: ignore[call-arg]
    expected = oracle(*inputs, documents, **OPTIONS[name])
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    ours_grads, grads = (torch.autograd.grad(x, inputs, weights) for x in (ours, expected))
    torch.testing.assert_close(ours_grads, grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("block", [3, 512])
@pytest.mark.parametrize("name", OPTIONS)
def test_shared_prefix_gives_what_whole_documents_give(name: str, block: int, monkeypatch: pytest.MonkeyPatch):
    """Documents of 9, 11 and 11 tokens. The second has 5 tokens in common with the first, the third 7 with it."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", block)
    torch.manual_seed(0)
    rows = [torch.arange(9), torch.cat([torch.arange(5), torch.arange(9, 15)])]
    rows.append(torch.cat([rows[1][:7], torch.arange(15, 19)]))
    inputs = [torch.randn(1, heads, 19, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights = torch.randn(1, 31, 4, 8, dtype=torch.float64)

    announce((9, 6, 4), CPU, keys=(9, 11, 11), key_rows=torch.cat(rows))
    shared = packed_attention(torch.nn.Identity(), *inputs, None, **OPTIONS[name])[0][:, torch.cat(rows)]  # type: ignore[call-arg]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 11, 11]))
    expected = oracle(*(x[:, :, torch.cat(rows)] for x in inputs), documents, **OPTIONS[name])
    torch.testing.assert_close(shared, expected, rtol=1e-9, atol=1e-9)
    found, grads = (torch.autograd.grad(x, inputs, weights) for x in (shared, expected))
    torch.testing.assert_close(found, grads, rtol=1e-9, atol=1e-9)


def test_rows_are_one_document_each():
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, 7, 4, dtype=torch.float64) for _ in range(3))
    announce(None, CPU)
    ours, _ = packed_attention(torch.nn.Identity(), query, key, value, None)
    for row in range(3):
        one = (x[row : row + 1] for x in (query, key, value))
        torch.testing.assert_close(ours[row : row + 1], oracle(*one, torch.zeros(7)), rtol=1e-9, atol=1e-9)


def test_no_tensor_has_the_square_of_the_pack():
    """32 documents of 64 tokens: nothing as large as 2,048 × 2,048 is ever made, with or without a window."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.elements = max(self.elements, leaf.numel())
            return result

    inputs = [torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3)]
    for options in ({}, {"sliding_window": 16}, {"softcap": 2.0}):
        announce((64,) * 32, CPU)
        with Largest() as largest:
            packed_attention(torch.nn.Identity(), *inputs, None, **options)[0].sum().backward()  # type: ignore[call-arg]
        assert largest.elements <= 2 * 2048 * 64


def test_elements_made_do_not_grow_with_documents_times_tokens():
    """2,048 tokens in 8 and in 128 documents of different lengths: the gradient of a slice would be a whole row."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Made(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if not func.is_view:
                leaves = torch.utils._pytree.tree_leaves(result)
                self.elements += sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))
            return result

    def made(documents: int) -> int:
        length = 2048 // documents
        announce((length - 1, length + 1) * (documents // 2), CPU)
        inputs = [torch.randn(1, 2, 2048, 8, requires_grad=True) for _ in range(3)]
        with Made() as seen:
            packed_attention(torch.nn.Identity(), *inputs, None)[0].sum().backward()  # type: ignore[call-arg]
        return seen.elements

    assert made(128) <= 1.5 * made(8)


def test_lengths_are_read_from_positions():
    assert document_lengths(torch.tensor([[0, 1, 2, 0, 0, 1]])) == (3, 1, 2)
    assert document_lengths(torch.arange(3).expand(2, 3)) is None


def test_a_model_s_own_mask_is_refused():
    query = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ConfigError, match="use sdpa or eager"):
        packed_attention(torch.nn.Identity(), query, query, query, torch.ones(4, 4))


def fake_kernel(query, key, value, starts, key_starts, longest, longest_key, *, scale, window_size=(-1, -1)):
    """torch 2.11's kernel as a softmax per document: [L, H, D], a key head for every query head."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert longest == int(starts.diff().max())
    outputs = []
    for (a, b), (c, d) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)[None]
        hidden = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
        outputs.append(((q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def fake_grouped_kernel(query, key, value, *rest, enable_gqa=False, **options):
    """torch 2.13's: it repeats key heads itself where it is asked to."""
    assert enable_gqa
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    return fake_kernel(query, key, value, *rest, **options)


@pytest.mark.parametrize("kernel", [fake_kernel, fake_grouped_kernel])
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_s_heads_are_repeated_where_it_takes_no_groups(
    kernel: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    torch.manual_seed(0)
    documents = attention.Documents((5, 3), (9, 3), CPU)
    query, key = torch.randn(1, 4, 8, 6, dtype=torch.float64), torch.randn(1, 2, 12, 6, dtype=torch.float64)
    value = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    scoring = attention._Scoring(scale=0.4, window=window, softcap=None, sinks_H=None, dropout=0.0)
    found = attention._varlen(query, key, value, scoring, documents)
    expected = attention._attend_documents(query, key, value, scoring, documents)
    assert found.shape == expected.shape == (1, 4, 8, 4)
    assert (found - expected).abs().max() <= 1e-12
