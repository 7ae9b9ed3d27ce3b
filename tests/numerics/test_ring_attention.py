"""Ring attention over real ranks equals attention over the whole, outputs and gradients; its plan by hand."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.ring import EXACT, FLASH, Ring, RingPlan, ring_attention
from pipelinerl.finetune.sequence import sequence_attention, set_layout

SCRIPT = Path(__file__).parents[1] / "ranks" / "ring_rank.py"
RANKS = 4


def plan(*first_tokens: int, index: int) -> RingPlan:
    return RingPlan(first_tokens, 4, 3, index)


def test_plan_document_over_all_slices_needs_every_hop():
    # 0 1 2 3 | 4 5 6 7 | 8 9 10 11, documents at 0 and 9
    middle, last = plan(0, 9, index=1), plan(0, 9, index=2)
    assert (middle.documents, last.documents) == ((4,), (1, 3))
    assert (middle.num_looking_back, last.num_looking_back) == (4, 1)
    assert middle.num_hops == last.num_hops == 2
    assert [last.num_keys(0, 1), last.num_keys(0, 2), last.num_keys(1, 2)] == [4, 4, 4]


def test_plan_only_keys_of_the_shared_document_travel():
    # documents at 0, 3 and 8: rank 1's first tokens belong to the one that began at 3, rank 2's began with it
    last = plan(0, 3, 8, index=2)
    assert last.num_hops == 1
    assert (last.documents, last.num_looking_back) == ((4,), 0)
    assert [last.num_keys(0, 1), last.num_keys(1, 2), last.num_keys(0, 2)] == [1, 0, 0]
    assert [last.num_keys(2, 3), last.num_keys(-1, 0), last.num_keys(1, 1), last.num_keys(2, 0)] == [0, 0, 0, 0]


def test_plan_documents_within_slices_need_no_hop():
    assert plan(0, 4, 8, index=1).num_hops == 0
    assert plan(0, 4, 6, 8, index=1).documents == (2, 2)


def test_ring_over_two_and_four_ranks_equals_attention_over_the_whole():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
        assert len(errors) == 24
        for layout, error in errors.items():
            assert error <= (1e-12 if "float64" in layout else 1e-5), layout


def test_alone_a_rank_attends_within_each_document():
    """Values are one-hot: outputs are the attention weights themselves, zero outside document and past."""
    query, key = torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)
    out = ring_attention(query, key, torch.eye(4)[None], Ring(RingPlan((0, 1), 4)), 1.0)
    third = 1 / 3
    expected = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0.5, 0.5, 0], [0, third, third, third]])
    torch.testing.assert_close(out[0], expected)


def test_under_autocast_inputs_are_narrowed_once_and_sums_stay_wide():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
    set_layout((5,), 5, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = sequence_attention(torch.nn.Identity(), query, key, value.bfloat16(), None)
    narrow = [x[0].bfloat16() for x in (query, key, value)]
    assert torch.equal(output[0].transpose(0, 1), ring_attention(*narrow, Ring(RingPlan((0,), 5)), 8**-0.5))
    exact = ring_attention(*(x.float() for x in narrow), Ring(RingPlan((0,), 5)), 8**-0.5)
    assert torch.equal(output[0].transpose(0, 1), exact.bfloat16())


@pytest.mark.parametrize("option", [{"sliding_window": 4}, {"softcap": 50.0}, {"dropout": 0.1}])
def test_attention_that_the_ring_does_not_compute_is_refused_by_name(option: dict[str, float]):
    query = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ConfigError, match=f"seq_parallel.*{next(iter(option))}"):
        sequence_attention(torch.nn.Identity(), query, query, query, None, **option)


@pytest.mark.parametrize("documents", [None, (4, 5)])
def test_flash_kernel_is_called_as_torch_declares_it(documents: tuple[int, ...] | None):
    """On meta tensors torch checks arguments and gives the shapes; numbers need a GPU (tests/gpu)."""
    keys = 7 if documents is None else 9
    query, key, value = (torch.empty(h, n, 64, device="meta").bfloat16() for h, n in ((4, 9), (2, keys), (2, keys)))
    outputs = [kernel.forward(query, key, value, 0.1, documents) for kernel in (FLASH, EXACT)]
    assert [x.shape for x in outputs[0]] == [x.shape for x in outputs[1]] == [(4, 9, 64), (4, 9)]
    (_, lse), gradient = outputs[0], torch.empty_like(query)
    for kernel in (FLASH, EXACT):
        d_query, d_kv = kernel.backward(gradient, query, key, value, query, lse, 0.1, documents)
        assert (d_query.shape, d_kv.shape) == (query.shape, (2, *key.shape))
