"""One rank of shared attention: its rows of outputs and gradients against attention over the whole.

Writes the largest error of each layout, kind of attention, group size and dtype to `out` with the suffix `.<rank>`.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.finetune import attention, sequence
from pipelinerl.finetune.attention import announce, packed_attention
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.finetune.sequence import rows_of_ranks

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE, VALUE_SIZE = 6, 2, 8, 6
LAYOUTS = {
    "one document": (40,),
    "odd lengths": (13, 1, 7, 19),
    "cut where blocks end": (5, 5, 10, 20),
    "equal neighbours": (3, 3, 3, 3, 3, 9, 9, 7),
    "single tokens at the end": (35, 1, 1, 1, 1, 1),
}
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5])
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "softcap, sinks": {"softcap": 1.5, "s_aux": SINKS, "scaling": 0.3},
}


def attend(inputs: list[Tensor], lengths: tuple[int, ...], group: SequenceGroup | None, kind: str) -> Tensor:
    announce(lengths, CPU, group)
    options = {name: x.to(inputs[0].dtype) if isinstance(x, Tensor) else x for name, x in KINDS[kind].items()}
    return packed_attention(torch.nn.Identity(), *inputs, None, **options)[0].transpose(1, 2)  # type: ignore[call-arg]


def error(lengths: tuple[int, ...], group: SequenceGroup, kind: str, dtype: torch.dtype) -> float:
    """Largest difference of outputs and gradients in this rank's rows."""
    total = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    heads = ((HEADS, SIZE), (KV_HEADS, SIZE), (KV_HEADS, VALUE_SIZE), (HEADS, VALUE_SIZE))
    *whole, weights = (torch.randn(1, h, total, size, generator=generator, dtype=dtype) for h, size in heads)

    def own(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, rows] for rows in rows_of_ranks(lengths, group.size)[group.index]], 2)

    local = [own(x).requires_grad_() for x in whole]
    for x in whole:
        x.requires_grad_()
    ours = attend(local, lengths, group, kind)
    grads = torch.autograd.grad(ours, local, own(weights))
    expected = attend(whole, lengths, None, kind)
    expected_grads = torch.autograd.grad(expected, whole, weights)
    pairs = [(ours, expected), *zip(grads, expected_grads, strict=True)]
    return max((a - own(b)).abs().max().item() for a, b in pairs)


def groups() -> list[SequenceGroup]:
    """All four ranks, and this rank's pair of neighbours."""
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    return [SequenceGroup(dist.group.WORLD, rank, 4), SequenceGroup(pairs[rank // 2], rank % 2, 2)]


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    attention.QUERY_BLOCK, sequence.LONG_DOCUMENT = 4, 8
    dist.init_process_group("gloo")
    errors = {}
    for group in groups():
        for name, lengths in LAYOUTS.items():
            for kind in KINDS:
                for dtype in (torch.float64, torch.float32):
                    errors[f"{name}, {kind}, {group.size} ranks, {dtype}"] = error(lengths, group, kind, dtype)
    Path(job["out"]).with_suffix(f".{dist.get_rank()}").write_text(json.dumps(errors))
    dist.destroy_process_group()
