"""Attention that ranks share equals attention over the whole, outputs and gradients. Their slices and work, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.receivers import forkserver
from pipelinerl.finetune import attention, sequence
from pipelinerl.finetune.attention import announce, packed_attention
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.finetune.sequence import DocumentSlice, rows_of_ranks, slices_of
from tests.rank_processes import call_on_ranks
from tests.ranks import sequence_rank

RANKS = 4
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "wide window": {"sliding_window": 23},
    "softcap, sinks": {"softcap": 2.0, "s_aux": torch.linspace(-1, 2, 9).double(), "scaling": 0.2, "sliding_window": 9},
}


def test_ranks_hold_a_block_from_the_beginning_and_one_from_the_end(monkeypatch: pytest.MonkeyPatch):
    assert rows_of_ranks((12,), 3) == [
        [slice(0, 2), slice(10, 12)],
        [slice(2, 4), slice(8, 10)],
        [slice(4, 6), slice(6, 8)],
    ]
    # with documents of 4 tokens cut by themselves: 0 … 4 | 5 6 7, the first token that is left over goes to rank 0
    monkeypatch.setattr(sequence, "LONG_DOCUMENT", 4)
    assert rows_of_ranks((5, 3), 2) == [
        [slice(0, 2), slice(4, 5), slice(5, 6)],
        [slice(2, 3), slice(3, 4), slice(6, 7), slice(7, 8)],
    ]


def test_parts_see_their_document_from_its_first_token_on():
    # 0 1 2 | 3 4 5 6 7: rank 0 of 2 holds 0 1 and 6 7, rank 1 holds 2 3 and 4 5
    first, second = (slices_of((3, 5), SequenceGroup(None, index, 2)) for index in (0, 1))
    assert first == [DocumentSlice(2, slice(0, 2)), DocumentSlice(2, slice(3, 8))]
    assert second == [DocumentSlice(1, slice(0, 3)), DocumentSlice(1, slice(3, 4)), DocumentSlice(2, slice(3, 6))]


@given(lengths=st.lists(st.integers(1, 1100), min_size=1, max_size=8), ranks=st.integers(2, 8))
def test_ranks_hold_every_token_once_and_as_many(lengths: list[int], ranks: int):
    lengths += [1] * (-sum(lengths) % ranks)
    held = [[row for run in rows for row in range(run.start, run.stop)] for rows in rows_of_ranks(lengths, ranks)]
    assert {len(rows) for rows in held} == {sum(lengths) // ranks}
    assert sorted(row for rows in held for row in rows) == list(range(sum(lengths)))
    assert all(rows == sorted(rows) for rows in held)


def pairs_of_tokens(lengths: tuple[int, ...], ranks: int) -> list[int]:
    """Pairs of a query and a key that each rank computes, which is its work in attention."""
    work = []
    for index in range(ranks):
        slices = slices_of(lengths, SequenceGroup(None, index, ranks))
        spans = ((one.queries, one.keys.stop - one.keys.start) for one in slices)
        work.append(sum(queries * seen - queries * (queries - 1) // 2 for queries, seen in spans))
    return work


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(32_768,), (31_001, *[1] * 1767), (300,) * 30 + (20_000, 3_001, 767)])
def test_long_documents_are_the_same_work_for_every_rank(lengths: tuple[int, ...], ranks: int):
    work = pairs_of_tokens(lengths, ranks)
    assert sum(work) == sum(length * (length + 1) // 2 for length in lengths)
    assert max(work) * ranks <= 1.05 * sum(work)


def test_attention_over_two_and_four_ranks_equals_attention_over_the_whole(tmp_path: Path):
    out = tmp_path / "errors"
    with forkserver(sequence_rank.__name__):
        call_on_ranks(sequence_rank.main, {"out": str(out)}, out, RANKS)
    for rank in range(RANKS):
        errors = json.loads(out.with_suffix(f".{rank}").read_text())
        assert len(errors) == 2 * 5 * 3 * 2
        for layout, error in errors.items():
            assert error <= (1e-12 if "float64" in layout else 1e-5), layout


def dense_attention(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], kind: str) -> Tensor:
    """The definition, with all scores: query head h uses key head ⌊h / 3⌋, and documents do not see each other."""
    options: dict[str, Any] = KINDS[kind]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(document))[:, None] - torch.arange(len(document))
    visible = (document[:, None] == document) & (distance >= 0) & (distance < options.get("sliding_window", 1000))
    scores = query @ key.repeat_interleave(3, 1).mT * options.get("scaling", query.shape[-1] ** -0.5)
    if "softcap" in options:
        scores = (scores / options["softcap"]).tanh() * options["softcap"]
    weights = scores.masked_fill(~visible, -torch.inf).exp()
    sinks = options["s_aux"].exp()[:, None, None] if "s_aux" in options else 0.0
    return weights / (weights.sum(-1, keepdim=True) + sinks) @ value.repeat_interleave(3, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_parts_of_all_ranks_are_dense_attention_in_float64(
    ranks: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9 query heads and 3 key heads, which 4 and 8 ranks do not divide, and packs of fewer tokens than ranks."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 6)
    monkeypatch.setattr(sequence, "LONG_DOCUMENT", 8)
    torch.manual_seed(0)
    for documents in ((61,), (17, 1, 3, 29, 2, 7, 8, 5), (1,), (2, 3), (3,) * 11):
        lengths = (*documents, *[1] * (-sum(documents) % ranks))
        sizes = ((9, 16), (3, 16), (3, 10), (9, 10))
        *inputs, weights = (torch.randn(1, h, sum(lengths), size, dtype=torch.float64) for h, size in sizes)
        query, key, value = (x.requires_grad_() for x in inputs)
        rows = [torch.cat([torch.arange(s.start, s.stop) for s in run]) for run in rows_of_ranks(lengths, ranks)]
        gathered = torch.cat([key, value], -1)[:, :, torch.cat(rows)]
        monkeypatch.setattr(attention, "gather_tokens", lambda mine, group, whole=gathered: whole)
        ours = torch.zeros_like(weights)
        for index, own in enumerate(rows):
            announce(lengths, torch.device("cpu"), SequenceGroup(None, index, ranks))
            parts = (x[:, :, own] for x in (query, key, value))
            ours[:, :, own] = packed_attention(torch.nn.Identity(), *parts, None, **KINDS[kind])[0].transpose(1, 2)  # type: ignore[call-arg]
        expected = dense_attention(query, key, value, lengths, kind)
        pairs = [(ours, expected)]
        gradients = (torch.autograd.grad((x * weights).sum(), (query, key, value)) for x in (ours, expected))
        pairs += zip(*gradients, strict=True)
        assert max((a - b).abs().max().item() for a, b in pairs) <= 1e-12, lengths


def test_under_autocast_inputs_are_narrowed_before_they_travel():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    announce((5,), torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = packed_attention(torch.nn.Identity(), query, key, value.bfloat16(), None)
    narrow, _ = packed_attention(torch.nn.Identity(), *(x.bfloat16() for x in (query, key, value)), None)  # type: ignore[call-arg]
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, narrow)
