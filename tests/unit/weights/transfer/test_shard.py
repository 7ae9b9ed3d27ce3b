"""What a tensor-parallel worker keeps of a version: exactly the elements that its loaders copy."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from pipelinerl.weights.layout import ALIGNMENT, Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.live_check import differing
from pipelinerl.weights.protocol import Runs
from pipelinerl.weights.transfer.delta import encode_delta
from pipelinerl.weights.transfer.shard import (
    Copy,
    LoadPlan,
    Shard,
    View,
    end_of,
    gather_runs,
    runs_of,
    staged_copies,
    staged_wholes,
)
from pipelinerl.weights.transfer.wire import WireError
from tests.says import says
from tests.tensor_parallel import gathered, put

Weights = dict[str, torch.Tensor]


class Model(nn.Module):
    """Loads like vLLM's layers at tensor-parallel size 2: by columns, by rows, fused, whole, and computed."""

    def __init__(self, rank: int, *, computes: bool = False):
        super().__init__()
        self.rank, self.computes = rank, computes
        for name, shape in {"qkv": (24, 16), "out": (16, 8), "embed": (20, 16), "norm": (16,), "scaled": (6,)}.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half = lambda tensor, dim: tensor.narrow(dim, self.rank * tensor.shape[dim] // 2, tensor.shape[dim] // 2)  # noqa: E731
        for name, tensor in weights:
            if name in "qkv":
                at = 8 * "qkv".index(name)
                self.qkv.data[at : at + 8].copy_(half(tensor, 0))
            elif name == "gain":
                self.scaled.data.copy_(1 + tensor if self.computes else tensor)
            elif name == "spare":
                continue
            else:
                getattr(self, name).data.copy_(
                    half(tensor, {"out": 1, "embed": 0}.get(name, 0)) if name != "norm" else tensor
                )


def weights(seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "out": (16, 16), "embed": (40, 16), "norm": (16,)}
    shapes |= {"gain": (6,), "spare": (500, 7)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def layout_of(given: Weights) -> Layout:
    return Layout(tuple(spec_of(*item) for item in given.items()))


def flat(given: Weights) -> torch.Tensor:
    layout = layout_of(given)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, buffer).fill(given.items())
    return buffer


def planned(rank: int, starts: tuple[int, ...] = (0,), **options: bool) -> tuple[Shard, LoadPlan]:
    with torch.device("meta"):
        model = Model(rank, **options)
    layout = layout_of(weights())
    plan = learn(model, model.load_weights, layout.specs)
    return Shard.of(layout, plan, starts), plan


def loaded(rank: int, given: Iterable[tuple[str, torch.Tensor]], **options: bool) -> Model:
    model = Model(rank, **options)
    model.load_weights(given)
    return model


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket", [64, 192, 1 << 20])
@pytest.mark.parametrize("starts", [(0,), (0, 1024, 1088, 5056), tuple(range(0, 19_000, 64))])
def test_copies_out_of_the_shard_are_what_loaders_copy_out_of_the_whole(
    rank: int, bucket: int, starts: tuple[int, ...]
) -> None:
    shard, plan = planned(rank, starts)
    given = weights()
    buffer = gathered(shard, flat(given), bucket)
    model = Model(rank)
    put(model, plan, shard, buffer)
    assert same(model, loaded(rank, given.items()))
    assert not [*differing(staged_copies(shard.layout, plan, shard), dict(model.named_parameters()), buffer)]
    kept, pieces = sum(parameter.nbytes for parameter in model.parameters()), sum(map(len, shard.stripes.values()))
    assert kept <= shard.num_bytes <= kept + ALIGNMENT * pieces
    assert shard.is_small


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_out_of_a_whole_version_are_what_loaders_copy(rank: int) -> None:
    _, plan = planned(rank)
    model, staged = Model(rank), flat(weights())
    for one in staged_copies(layout_of(weights()), plan, None):
        one.target_view.read(dict(model.named_parameters())[one.target].data).copy_(one.source(staged))
    assert same(model, loaded(rank, weights().items()))


def test_what_a_loader_computes_with_is_kept_whole_and_said() -> None:
    shard, plan = planned(1, computes=True)
    assert plan.unlearned == ("scaled",)
    assert shard.whole == ("gain",)
    plan, buffer = planned(1, computes=True)[1], gathered(shard, flat(weights()))
    wholes = staged_wholes(shard.layout, plan, shard, buffer)
    assert [*wholes] == ["gain"]
    assert torch.equal(wholes["gain"], weights()["gain"])


CUTS = {
    "columns": lambda t: [t[:, 16:32]],
    "two windows of columns": lambda t: [t[:, 0:8], t[:, 32:40]],
    "rows, transposed": lambda t: [t[4:12].t()],
    "columns, transposed": lambda t: [t[:, 16:32].t()],
    "window": lambda t: [t[3:9, 8:40]],
    "repeated": lambda t: [t[2:4, :1].expand(2, 5)],
    "all, and a part of it": lambda t: [t, t[:, 3:5]],
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("edges", [(0,), (0, 640), (0, 704, 1984), (0, 64, 128, 192)])
def test_every_kind_of_view_is_found_in_a_shard_that_stripes_cut(cut: str, edges: tuple[int, ...]) -> None:
    """Rows of 64 numbers are 128 bytes, so edges lie between rows and within them."""
    given = {"w": torch.arange(20 * 64, dtype=torch.float32).bfloat16().view(20, 64), "other": torch.ones(7, 3)}
    layout, parts = layout_of(given), CUTS[cut](given["w"])
    copies = [Copy(str(n), View.of(torch.empty(part.shape)), "w", View.of(part)) for n, part in enumerate(parts)]
    plan = LoadPlan(tuple(copies), ())
    shard = Shard.of(layout, plan, edges)
    buffer = gathered(shard, flat(given))
    found = [one.source(buffer) for one in staged_copies(layout, plan, shard)]
    assert [*map(torch.Tensor.tolist, found)] == [*map(torch.Tensor.tolist, parts)]


def test_run_that_a_stripe_tears_at_no_multiple_of_the_alignment_is_kept_whole() -> None:
    given = {"w": torch.randn(20, 48).bfloat16()}
    layout, part = layout_of(given), given["w"][:, 8:24]
    plan = LoadPlan((Copy("0", View.of(torch.empty(part.shape)), "w", View.of(part)),), ())
    assert Shard.of(layout, plan, [0]).num_bytes == part.numel() * 2
    shard = Shard.of(layout, plan, [0, 320])
    assert shard.num_bytes == layout.num_bytes
    [copy] = staged_copies(layout, plan, shard)
    assert torch.equal(copy.source(gathered(shard, flat(given))), part)


@pytest.mark.parametrize("rank", [0, 1])
def test_differences_of_two_stripes_reach_the_shard(rank: int) -> None:
    edge = 1024
    shard, plan = planned(rank, (0, edge))
    old, new = weights(), weights()
    for number, tensor in enumerate(new.values()):
        tensor.view(-1)[number::7] += 1.0
    before, after = flat(old), flat(new)
    buffer = gathered(shard, before)
    for start, end in ((0, edge), (edge, len(before))):
        payload = encode_delta(before[start:end], after[start:end])
        assert payload is not None
        shard.apply_delta(buffer, payload, start, end)
    model = Model(rank)
    put(model, plan, shard, buffer)
    assert same(model, loaded(rank, new.items()))


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t,
        lambda t: t[1:3],
        lambda t: t[:, 2:5],
        lambda t: t[:, :, 1:4],
        lambda t: t[1:3, 2:5],
        lambda t: t[1:3, 1:4, 2:3],
        lambda t: t.transpose(0, 2),
        lambda t: t.transpose(0, 1)[2:4],
        lambda t: t[::2],
        lambda t: t[0, 0, 0],
        lambda t: t[:, :, 0],
        lambda t: t[:1].expand(5, 6, 7),
    ],
)
def test_runs_hold_all_elements_of_a_view(cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor = torch.arange(4 * 6 * 7, dtype=torch.int32).view(4, 6, 7)
    view = cut(tensor)
    runs = runs_of(View.of(view), 4)
    flat_bytes = tensor.view(-1).view(torch.uint8)
    held = set(gather_runs([runs], flat_bytes, 0, 0, runs.num_bytes).view(torch.int32).tolist())
    wanted = set(view.reshape(-1).tolist())
    assert wanted <= held
    assert runs.end <= flat_bytes.numel()
    assert runs.num_bytes <= max(4 * len(wanted), 4 * (max(wanted) - min(wanted) + 1))


def test_any_window_of_any_runs_is_read_as_numpy_would() -> None:
    generator = np.random.default_rng(0)
    source = generator.integers(0, 256, 5000, dtype=np.uint8)
    for _ in range(200):
        length = int(generator.integers(1, 60))
        stride, count = length + int(generator.integers(0, 90)), int(generator.integers(1, 30))
        runs = Runs(0, int(generator.integers(0, 500)), length, stride, count)
        expected = np.concatenate([source[runs.first + i * stride :][:length] for i in range(count)])
        expected = np.pad(expected, (0, end_of([runs]) - len(expected)))
        edges = sorted({0, len(expected), *generator.integers(0, len(expected), 9).tolist()})
        parts = [gather_runs([runs], torch.from_numpy(source), 0, start, end).numpy() for start, end in pairwise(edges)]
        assert np.array_equal(np.concatenate(parts), expected)


@pytest.mark.parametrize("runs", [Runs(0, 900, 50, 50, 3), Runs(0, 90, 20, 20, 1), Runs(0, 1001, 8, 8, 1)])
def test_runs_outside_a_stripe_are_refused(runs: Runs) -> None:
    with pytest.raises(WireError, match=says("stripe", 900, 100)):
        gather_runs([runs], torch.zeros(900, dtype=torch.uint8), 100, 0, 8)


def test_workers_with_the_same_bytes_have_the_same_name() -> None:
    assert planned(0)[0].name == planned(0)[0].name
    assert planned(0)[0].name != planned(1)[0].name
