"""The swap into models of a few layers: copies, computed parameters, addresses, and models that it does not know.

`test_shard_models.py` swaps into vLLM's own models.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.learning import learn, without_memory
from pipelinerl.weights.transfer.shard import Shard, staged_copies, staged_wholes
from tests.says import says

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
CPU = torch.device("cpu")
CONFIG: Any = SimpleNamespace(dtype=torch.float32)


class Model(nn.Module):
    """Copies q and k into one matrix, and adds one to the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4), requires_grad=False)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "norm":
                self.norm.copy_(tensor + 1)
            else:
                at = 4 * "qk".index(name)
                self.qk[at : at + 4].copy_(tensor)


def sent(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in {"q": (4, 4), "k": (4, 4), "norm": 4}.items()
    }


def staged(weights: dict[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    layout = Layout(tuple(spec_of(*item) for item in weights.items()))
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    StripeBuffer(layout, buffer).fill(weights.items())
    return layout, buffer


class Update:
    """A live model and its swap."""

    def __init__(self) -> None:
        from pipelinerl.weights.load.swap import Census, Swap

        with without_memory():
            self.bare = Model()
        self.live = Model()
        self.swap, self.census = Swap.of(self.live, self.bare, CONFIG, CPU), Census(self.live)
        self.layout, self.buffer = staged(sent(0))
        self.plan = learn(self.bare, self.bare.load_weights, self.layout.specs)
        self.copies = staged_copies(self.layout, self.plan, None)

    def prepare(self, seed: int) -> None:
        self.buffer.copy_(staged(sent(seed))[1])
        wholes = staged_wholes(self.layout, self.plan, None, self.buffer)
        self.swap.prepare(self.copies, self.buffer, self.plan.unlearned, wholes)

    def is_version(self, seed: int) -> bool:
        expected = Model()
        expected.load_weights(sent(seed).items())
        return all(map(torch.equal, self.live.parameters(), expected.parameters()))


def test_swaps_copy_and_compute_and_leave_every_address() -> None:
    update = Update()
    before = update.census.take()
    assert update.plan.unlearned == ("norm",)
    for seed in (1, 2):
        live = [parameter.clone() for parameter in update.live.parameters()]
        update.prepare(seed)
        assert all(map(torch.equal, update.live.parameters(), live)), "the live model goes on until the swap"
        update.swap.swap()
        assert update.is_version(seed)
    update.census.check(before, captures_graphs=True)
    assert all(parameter.is_meta for parameter in update.bare.parameters())


def test_views_are_made_again_when_the_staged_bytes_lie_elsewhere() -> None:
    update = Update()
    update.prepare(1)
    update.swap.forget()
    update.buffer = torch.zeros_like(update.buffer)
    update.prepare(2)
    update.swap.swap()
    assert update.is_version(2)


def test_shard_with_a_tensor_that_is_computed_is_swapped_too() -> None:
    update = Update()
    shard = Shard.of(update.layout, update.plan, [0])
    _, buffer = staged(sent(3))
    wholes = staged_wholes(update.layout, update.plan, shard, buffer)
    update.swap.prepare(staged_copies(update.layout, update.plan, shard), buffer, update.plan.unlearned, wholes)
    update.swap.swap()
    assert update.is_version(3)


def test_tensor_that_moved_is_refused_where_graphs_were_captured(caplog: pytest.LogCaptureFixture) -> None:
    update = Update()
    before = update.census.take()
    update.live.qk.data = update.live.qk.data.clone()
    update.census.check(before, captures_graphs=False)
    with pytest.raises(WeightUpdateError, match=says("moved", 1, "qk", "enforce-eager")):
        update.census.check(before, captures_graphs=True)
    assert "event=weights_moved tensors=1 first=qk" in caplog.text


def test_graphs_are_captured_unless_the_mode_is_none() -> None:
    from vllm.config import CUDAGraphMode

    from pipelinerl.weights.load.swap import captures_graphs

    def config(mode: Any) -> Any:
        return SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))

    assert not captures_graphs(config(None))
    assert not captures_graphs(config(CUDAGraphMode.NONE))
    assert captures_graphs(config(CUDAGraphMode.PIECEWISE))
    assert captures_graphs(config(CUDAGraphMode.FULL_AND_PIECEWISE))


@pytest.mark.parametrize("change", ["method", "shape", "name"])
def test_model_that_keeps_its_weights_in_another_form_is_not_swapped(change: str) -> None:
    from pipelinerl.weights.load.swap import Swap

    live, bare = Model(), Model()
    if change == "method":
        live.quant_method = object()  # type: ignore[assignment]
    elif change == "shape":
        live.qk.data = live.qk.data.t()
    else:
        live.norm = None  # type: ignore[assignment]
    with pytest.raises(WeightUpdateError):
        Swap.of(live, bare, CONFIG, CPU)
