"""A decoder that loads as vLLM's layers do at any tensor-parallel size, without vLLM.

Its loaders fuse, cut by rows and by columns, and pad. Layers, vocabulary and workers can be as many as in real models.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from pipelinerl.weights.transfer.shard import LoadPlan, Shard, gather_runs, staged_copies

PADDING = 64
"""vLLM pads vocabularies to a multiple of this."""
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. Heads are 8 wide."""

    vocab: int
    heads: int = 8
    kv_heads: int = 2
    inter: int = 128
    layers: int = 2
    tied: bool = True
    dtype: torch.dtype = torch.bfloat16

    @property
    def hidden(self) -> int:
        return 8 * self.heads

    def weights(self, seed: int = 0) -> Weights:
        """Names and values as in a checkpoint."""
        shapes: dict[str, tuple[int, ...]] = {"embed.": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            square, kv = (self.hidden, self.hidden), (8 * self.kv_heads, self.hidden)
            up, down = (self.inter, self.hidden), (self.hidden, self.inter)
            parts = {"q": square, "k": kv, "v": kv, "out": square, "gate": up, "up": up, "down": down}
            shapes |= {f"{part}.{layer}": shape for part, shape in parts.items()} | {f"norm.{layer}": (self.hidden,)}
        if not self.tied:
            shapes["head."] = shapes["embed."]
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator).to(self.dtype) for name, shape in shapes.items()}


class Decoder(nn.Module):
    """One worker's part of a decoder."""

    def __init__(self, shape: Shape, rank: int, size: int, *, looks_at: str = ""):
        """``looks_at``: name of a tensor whose values the loader looks at, which it cannot without memory."""
        super().__init__()
        self.shape, self.rank, self.size, self.looks_at = shape, rank, size, looks_at
        self.rows = -(-shape.vocab // (PADDING * size)) * PADDING
        self.q, self.kv, self.inter = shape.hidden // size, 8 * max(shape.kv_heads // size, 1), shape.inter // size
        made = dict.fromkeys(("embed.",) if shape.tied else ("embed.", "head."), (self.rows, shape.hidden))
        for layer in range(shape.layers):
            made |= {f"qkv.{layer}": (self.q + 2 * self.kv, shape.hidden), f"out.{layer}": (shape.hidden, self.q)}
            made |= {f"gate_up.{layer}": (2 * self.inter, shape.hidden), f"down.{layer}": (shape.hidden, self.inter)}
            made |= {f"norm.{layer}": (shape.hidden,)}
        self.params = {name: torch.zeros(size, dtype=shape.dtype) for name, size in made.items()}
        for name, tensor in self.params.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == self.looks_at and bool(tensor.isnan().any()):
                raise ValueError(name)
            self._load(name, tensor)

    def _load(self, name: str, tensor: torch.Tensor) -> None:
        kind, _, layer = name.partition(".")
        match kind:
            case "embed" | "head":
                start = min(self.rank * self.rows, self.shape.vocab)
                rows = tensor.narrow(0, start, min(self.rows, self.shape.vocab - start))
                self.params[name][: len(rows)].copy_(rows)
                self.params[name][len(rows) :].fill_(0)
            case "q":
                self.params[f"qkv.{layer}"][: self.q].copy_(tensor.narrow(0, self.rank * self.q, self.q))
            case "k" | "v":
                at = self.q + (self.kv if kind == "v" else 0)
                part = self.rank * self.shape.kv_heads // self.size * 8
                self.params[f"qkv.{layer}"][at : at + self.kv].copy_(tensor.narrow(0, part, self.kv))
            case "gate" | "up":
                at = self.inter if kind == "up" else 0
                part = tensor.narrow(0, self.rank * self.inter, self.inter)
                self.params[f"gate_up.{layer}"][at : at + self.inter].copy_(part)
            case "out" | "down":
                width = self.params[name].shape[1]
                self.params[name].copy_(tensor.narrow(1, self.rank * width, width))
            case _:
                self.params[name].copy_(tensor)


def gathered(shard: Shard, whole: torch.Tensor, bucket: int = 1 << 20) -> torch.Tensor:
    """The shard as the trainer's ranks give it, each from its stripe."""
    buffer = torch.zeros(shard.num_bytes, dtype=torch.uint8)
    for start, end in pairwise([*shard.stripes, len(whole)]):
        low, high = shard.place(start)
        for place in range(low, high, bucket):
            upto = min(place + bucket, high)
            buffer[place:upto] = gather_runs(shard.stripes[start], whole[start:end], start, place, upto)
    return buffer


@torch.no_grad()
def put(model: nn.Module, plan: LoadPlan, shard: Shard, buffer: torch.Tensor) -> None:
    """Copies a shard to where the model's loaders would put it."""
    live = dict(model.named_parameters())
    for one in staged_copies(shard.layout, plan, shard):
        one.target_view.read(live[one.target].data).copy_(one.source(buffer))
