"""The flat buffer: places, bytes, and refusal of anything that does not match the announced list."""

from itertools import pairwise

import pytest
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.protocol import ParamSpec
from tests.says import says

SPECS = (
    ParamSpec("a", "float32", (3, 5)),
    ParamSpec("b", "bfloat16", (7,)),
    ParamSpec("c", "float32", ()),
    ParamSpec("d", "uint8", (0,)),
    ParamSpec("e", "int64", (2,)),
)


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("a", torch.randn(3, 5, generator=generator)),
        ("b", torch.randn(7, generator=generator).bfloat16()),
        ("c", torch.tensor(2.5)),
        ("d", torch.empty(0, dtype=torch.uint8)),
        ("e", torch.tensor([2**40, -1])),
    ]


def test_layout_offsets_are_aligned_and_sized_by_hand() -> None:
    layout = Layout(SPECS)
    assert layout.offsets == (0, 64, 128, 192, 192)  # 60 → 64, 14 → 64, 4 → 64, 0, 16 → 64
    assert layout.num_bytes == 256


@pytest.mark.parametrize("bucket_bytes", [64, 100, 256, 1000])
def test_fill_and_views_through_buckets_of_any_size_return_every_bit(bucket_bytes: int) -> None:
    layout = Layout(SPECS)
    sent = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, sent).fill(tensors())
    received = torch.full_like(sent, 255)
    for source, target in zip(sent.split(bucket_bytes), received.split(bucket_bytes), strict=True):
        target.copy_(source)
    views = dict(layout.views(received))
    assert list(views) == ["a", "b", "c", "d", "e"]
    assert all(torch.equal(views[name], tensor) for name, tensor in tensors())


def test_fill_takes_noncontiguous_tensors() -> None:
    source = torch.arange(12.0).view(3, 4).t()
    layout = Layout((spec_of("w", source),))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, buffer).fill([("w", source)])
    assert torch.equal(dict(layout.views(buffer))["w"], source)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", torch.zeros(3, 5))], "parameter 'b' did not come"),
        ([("b", torch.zeros(7))], "'b' came where the layout has 'a'"),
        ([("a", torch.zeros(5, 3))], r"is torch.float32 \(5, 3\), the layout says torch.float32 \(3, 5\)"),
        ([("a", torch.zeros(3, 5).double())], "is torch.float64"),
        ([*tensors(), ("f", torch.zeros(1))], "'f' came where the layout has None"),
    ],
)
def test_fill_refuses_what_differs_from_the_list(given: list[tuple[str, torch.Tensor]], message: str) -> None:
    layout = Layout(SPECS)
    with pytest.raises(WeightUpdateError, match=message):
        StripeBuffer(layout, torch.zeros(layout.num_bytes, dtype=torch.uint8)).fill(given)


def test_layout_with_a_name_twice_is_refused() -> None:
    with pytest.raises(WeightUpdateError, match=says("2 parameters", 1, "names")):
        Layout((ParamSpec("a", "float32", (1,)), ParamSpec("a", "float32", (1,))))


@pytest.mark.parametrize("edges", [(0, 64, 256), (0, 128, 192, 256), (0, 256, 256)])
def test_stripes_together_are_the_whole(edges: tuple[int, ...]) -> None:
    layout = Layout(SPECS)
    whole, made = torch.zeros(layout.num_bytes, dtype=torch.uint8), []
    StripeBuffer(layout, whole).fill(tensors())
    for start, end in pairwise(edges):
        made.append(torch.zeros(end - start, dtype=torch.uint8))
        StripeBuffer(layout, made[-1], start).fill(tensors())
    assert torch.equal(torch.cat(made), whole)
