"""Attention that ranks share equals attention over the whole, outputs and gradients. Their parts and work, by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.finetune import sequence
from pipelinerl.finetune.attention import announce, packed_attention
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.finetune.sequence import DocumentPart, parts_of, rows_of_ranks
from tests.ports import free_port

SCRIPT = Path(__file__).parents[1] / "ranks" / "sequence_rank.py"
RANKS = 4


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
    first, second = (parts_of((3, 5), SequenceGroup(None, index, 2)) for index in (0, 1))
    assert first == [DocumentPart(2, slice(0, 2)), DocumentPart(2, slice(3, 8))]
    assert second == [DocumentPart(1, slice(0, 3)), DocumentPart(1, slice(3, 4)), DocumentPart(2, slice(3, 6))]


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
        parts = parts_of(lengths, SequenceGroup(None, index, ranks))
        spans = ((part.queries, part.keys.stop - part.keys.start) for part in parts)
        work.append(sum(queries * seen - queries * (queries - 1) // 2 for queries, seen in spans))
    return work


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("lengths", [(32_768,), (31_001, *[1] * 1767), (300,) * 30 + (20_000, 3_001, 767)])
def test_long_documents_are_the_same_work_for_every_rank(lengths: tuple[int, ...], ranks: int):
    work = pairs_of_tokens(lengths, ranks)
    assert sum(work) == sum(length * (length + 1) // 2 for length in lengths)
    assert max(work) * ranks <= 1.05 * sum(work)


def test_attention_over_two_and_four_ranks_equals_attention_over_the_whole():
    port = free_port()
    processes = []
    for rank in range(RANKS):
        env = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT)],
                env=os.environ | env | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outcomes = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * RANKS, outcomes[0][1][-3000:]
    for said, _ in outcomes:
        errors = json.loads(said.splitlines()[-1])
        assert len(errors) == 2 * 5 * 3 * 2
        for layout, error in errors.items():
            assert error <= (1e-12 if "float64" in layout else 1e-5), layout


def test_under_autocast_inputs_are_narrowed_before_they_travel():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    announce((5,), torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = packed_attention(torch.nn.Identity(), query, key, value.bfloat16(), None)
    narrow, _ = packed_attention(torch.nn.Identity(), *(x.bfloat16() for x in (query, key, value)), None)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, narrow)
