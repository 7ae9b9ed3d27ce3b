"""One rank of ring attention, run as a process: its slice of outputs and gradients against attention over the whole.

    RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python ring_rank.py

Prints the largest error of each layout, group size and dtype as one line of JSON.
"""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipelinerl.finetune.ring import Ring, RingPlan, ring_attention
from pipelinerl.finetune.rl.tokens import SequenceGroup
from pipelinerl.observability.role import leave

LENGTH, HEADS, KV_HEADS, SIZE, SCALE = 6, 4, 2, 8, 0.3
LAYOUTS = {
    "one document": (0,),
    "cut where slices end": (0, 6, 12, 18),
    "one over three slices": (0, 3, 15),
    "begins with a slice's last token": (0, 11),
    "ends with a slice's first token": (0, 7, 13),
    "single tokens at the end": (0, 10, 21, 22, 23),
}


def whole_attention(query: Tensor, key: Tensor, value: Tensor, first_tokens: tuple[int, ...]) -> Tensor:
    """The oracle: scaled_dot_product_attention with a mask."""
    length = query.shape[1]
    places = torch.arange(length)
    documents = torch.isin(places, torch.tensor(first_tokens)).cumsum(0)
    mask = (documents[:, None] == documents) & (places <= places[:, None])
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (key, value))
    return F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, scale=SCALE)[0]


def error(ring: Ring, dtype: torch.dtype) -> float:
    """Largest difference of outputs and gradients in this rank's slice."""
    plan = ring.plan
    tokens = plan.length * plan.size
    generator = torch.Generator().manual_seed(0)
    shapes = [(HEADS, tokens, SIZE), (KV_HEADS, tokens, SIZE), (KV_HEADS, tokens, SIZE), (HEADS, tokens, SIZE)]
    *whole, weights = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    mine = slice(plan.index * plan.length, (plan.index + 1) * plan.length)
    local = [x[:, mine].clone().requires_grad_() for x in whole]
    for x in whole:
        x.requires_grad_()
    expected, ours = whole_attention(*whole, plan.first_tokens), ring_attention(*local, ring, SCALE)
    expected_grads = torch.autograd.grad(expected, whole, weights)
    grads = torch.autograd.grad(ours, local, weights[:, mine])
    pairs = [(ours, expected), *zip(grads, expected_grads, strict=True)]
    return max((a - b[:, mine]).abs().max().item() for a, b in pairs)


def groups() -> list[SequenceGroup]:
    """All four ranks, and this rank's pair of neighbours."""
    rank = dist.get_rank()
    pairs = [dist.new_group([first, first + 1]) for first in (0, 2)]
    return [SequenceGroup(dist.group.WORLD, rank, 4), SequenceGroup(pairs[rank // 2], rank % 2, 2)]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    errors = {}
    for group in groups():
        for name, first_tokens in LAYOUTS.items():
            inside = tuple(place for place in first_tokens if place < LENGTH * group.size)
            ring = Ring(RingPlan(inside, LENGTH, group.size, group.index), group)
            for dtype in (torch.float64, torch.float32):
                errors[f"{name}, {group.size} ranks, {dtype}"] = error(ring, dtype)
    dist.destroy_process_group()
    print(json.dumps(errors))


if __name__ == "__main__":
    main()
    leave(0)
