"""The digest of live tensors: what a loader copies is learned, and one bit that differs is found."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.live_check import differing
from pipelinerl.weights.transfer.checksum import ROW_BYTES, added, checksum
from pipelinerl.weights.transfer.shard import Copy, LoadPlan, View, staged_copies

ROWS, WIDTH = 6, 4


class Fused(nn.Module):
    """Loads as servers do: q, k and v into one matrix, one shard of the output by columns, a scale that is computed."""

    def __init__(self, device: str = "meta", shard: int = 1):
        super().__init__()
        self.shard = shard
        self.qkv = nn.Parameter(torch.zeros(3 * ROWS, WIDTH, dtype=torch.bfloat16, device=device))
        self.out = nn.Parameter(torch.zeros(ROWS, WIDTH // 2, dtype=torch.bfloat16, device=device))
        self.norm = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16, device=device))

    @torch.no_grad()
    def load(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in params:
            if name == "norm":
                self.norm.copy_(tensor + 1)
            elif name == "out":
                half = WIDTH // 2
                self.out.copy_(tensor.narrow(1, self.shard * half, half))
            else:
                self.qkv.narrow(0, "qkv".index(name) * ROWS, ROWS).copy_(tensor)


def sent(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (ROWS, WIDTH), "k": (ROWS, WIDTH), "v": (ROWS, WIDTH), "out": (ROWS, WIDTH), "norm": (WIDTH,)}
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def plan() -> LoadPlan:
    model = Fused()
    return learn(model, model.load, [spec_of(*item) for item in sent().items()])


def test_a_plan_knows_fused_and_sharded_places_and_says_what_is_computed(plan: LoadPlan) -> None:
    assert plan.unlearned == ("norm",)
    whole = View(0, (ROWS, WIDTH), (WIDTH, 1))
    assert [(copy.target, copy.target_view.offset, copy.source) for copy in plan.copies] == [
        ("qkv", 0, "q"),
        ("qkv", ROWS * WIDTH, "k"),
        ("qkv", 2 * ROWS * WIDTH, "v"),
        ("out", 0, "out"),
    ]
    assert plan.copies[0].source_view == whole
    assert plan.copies[3] == Copy("out", View(0, (ROWS, 2), (2, 1)), "out", View(2, (ROWS, 2), (WIDTH, 1)))


def differing_from(plan: LoadPlan, live: Fused, given: dict[str, torch.Tensor]) -> set[str]:
    layout = Layout(tuple(spec_of(*item) for item in given.items()))
    staged = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, staged).fill(given.items())
    return {*differing(staged_copies(layout, plan, None), dict(live.named_parameters()), staged)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_live_tensors_that_were_loaded_do_not_differ(plan: LoadPlan, dtype: torch.dtype) -> None:
    staged, live = sent(dtype), Fused("cpu")
    live.load(staged.items())
    assert differing_from(plan, live, staged) == set()


def fault(live: Fused, staged: dict[str, torch.Tensor], kind: str) -> str:
    """Breaks the live model; returns the parameter that differs."""
    older = {name: tensor.clone() for name, tensor in staged.items()}
    with torch.no_grad():
        if kind == "swapped pair":
            live.load((staged | {"k": staged["v"], "v": staged["k"]}).items())
        elif kind == "cast twice":
            live.load((staged | {"q": staged["q"].to(torch.float8_e4m3fn).to(torch.bfloat16)}).items())
        elif kind == "stale shard":
            staged["out"][0, 2] += 1
            live.load((staged | {"out": older["out"]}).items())
            return "out"
        elif kind == "swallowed":
            live.load(staged.items())
            staged["v"].view(torch.int16)[5, 3] ^= 1
        elif kind == "not a number":
            live.load(staged.items())
            live.qkv[0, 0] = float("nan")
    return "qkv"


@pytest.mark.parametrize("kind", ["swapped pair", "cast twice", "stale shard", "swallowed", "not a number"])
def test_a_fault_is_found_and_named(plan: LoadPlan, kind: str) -> None:
    staged, live = sent(), Fused("cpu")
    expected = fault(live, staged, kind)
    assert differing_from(plan, live, staged) == {expected}


def test_checksum_is_two_sums_and_sees_every_bit_and_every_place() -> None:
    words = torch.arange(1, 1 + 100_000, dtype=torch.int64)
    buffer = words.view(torch.uint8).clone()
    rows = sum(word * (1 + (word - 1) // 1024) for word in range(1, 100_001))
    columns = sum(word * (1 + (word - 1) % 1024) for word in range(1, 100_001))
    right = f"{rows:016x}{columns:016x}"
    assert checksum(buffer) == right
    for byte in (0, 70_001, len(buffer) - 1):
        changed = buffer.clone()
        changed[byte] ^= 1
        assert checksum(changed) != right
    for place in (11, 1034, 90_000):
        swapped = words.clone()
        swapped[[10, place]] = swapped[[place, 10]]
        assert checksum(swapped.view(torch.uint8)) != right


def test_checksum_of_few_and_of_negative_words() -> None:
    assert checksum(torch.empty(0, dtype=torch.uint8)) == "0" * 32
    buffer = torch.tensor([-1, -(2**63)], dtype=torch.int64).view(torch.uint8)
    assert checksum(buffer) == f"{(-1 - 2**63) % 2**64:016x}{(-1 - 2**64) % 2**64:016x}"


def test_checksum_of_a_whole_is_the_sum_of_its_stripes() -> None:
    whole = torch.randint(0, 256, (3 * ROW_BYTES + 40,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stripes = [(0, ROW_BYTES), (ROW_BYTES, 3 * ROW_BYTES), (3 * ROW_BYTES, len(whole))]
    parts = [checksum(whole[start:end], start) for start, end in stripes]
    assert added(parts) == checksum(whole)
    assert added(reversed(parts)) == checksum(whole)
    assert added([checksum(whole[start:end]) for start, end in stripes]) != checksum(whole)
