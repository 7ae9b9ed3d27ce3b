"""Load plans of loaders that look at values, change what they have copied, or get too little."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.load import learning
from pipelinerl.weights.load.learning import learn, learned, without_memory
from pipelinerl.weights.protocol import ParamSpec
from tests.says import says

LAYOUT = Layout(tuple(ParamSpec(f"expert.{n}", "float32", (3, 5)) for n in range(4)))


class Experts(nn.Module):
    """Has two of four experts, as a map says whose values its loader reads."""

    def __init__(self, first: int, *, looks: bool = False, then: str = ""):
        super().__init__()
        self.looks, self.then = looks, then
        self.map = torch.full((4,), -1, dtype=torch.int32)
        self.map[first : first + 2] = torch.arange(2, dtype=torch.int32)
        self.scale = torch.arange(5) * torch.ones(5)
        self.weight = nn.Parameter(torch.zeros(2, 3, 5), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if self.looks and bool(tensor.isnan().any()):
                raise ValueError(name)
            at = int(self.map[int(name[-1])])
            if at >= 0:
                self.weight.data[at].copy_(tensor)
                loaded.add("weight")
        if self.then:
            getattr(self.weight.data, self.then)(2.0)
        return loaded


def bare(first: int, **options: Any) -> Experts:
    with without_memory():
        return Experts(first, **options)


def test_integers_keep_their_values_and_floats_have_no_memory() -> None:
    model = bare(2)
    assert model.map.tolist() == [-1, -1, 0, 1]
    assert model.weight.is_meta
    assert model.scale.is_meta, "integers give way where they meet a tensor without memory"
    assert (model.scale.shape, model.scale.dtype) == ((5,), torch.float32)


def test_worker_copies_the_experts_that_its_map_names() -> None:
    model = bare(2)
    plan = learn(model, model.load_weights, LAYOUT.specs)
    assert [(copy.source, copy.target_view.offset) for copy in plan.copies] == [("expert.2", 0), ("expert.3", 15)]
    assert (plan.unlearned, plan.computed) == ((), frozenset())


@pytest.mark.parametrize("then", ["mul_", "add_"])
def test_parameter_that_is_changed_after_its_copy_is_computed(then: str) -> None:
    model = bare(0, then=then)
    plan = learn(model, model.load_weights, LAYOUT.specs)
    assert (plan.copies, plan.unlearned) == ((), ("weight",))
    assert plan.computed == {"expert.0", "expert.1"}


def test_padding_that_is_filled_is_not_computed() -> None:
    model = bare(0, then="fill_")
    assert learn(model, model.load_weights, LAYOUT.specs).unlearned == ()


def test_update_that_lacks_a_parameter_is_refused() -> None:
    model = bare(0)
    with pytest.raises(WeightUpdateError, match=says("lacks", 1, "weight")):
        learn(model, model.load_weights, LAYOUT.specs[2:])


def test_loader_that_looks_at_values_is_learned_on_zeros(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = learned(bare(2, looks=True), lambda: Experts(2, looks=True), LAYOUT)
    assert "event=loaders_look_at_values" in caplog.text
    without = bare(2)
    assert plan == learn(without, without.load_weights, LAYOUT.specs)


def test_buffer_into_which_a_loader_copies_is_learned() -> None:
    model = bare(0)
    model.register_buffer("bias", torch.zeros(5, device="meta"))
    model.register_buffer("cache", torch.zeros(5, device="meta"))
    specs = (*LAYOUT.specs, ParamSpec("bias", "float32", (5,)))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        *experts, (_, bias) = weights
        model.load_weights(experts)
        model.bias.copy_(bias)

    plan = learn(model, load, specs)
    assert [copy.target for copy in plan.copies] == ["weight", "weight", "bias"]
    assert plan.unlearned == ()


def test_parameter_that_has_memory_in_a_model_without_is_learned() -> None:
    """Hybrid models make some of theirs on a device of their own choice."""
    model = bare(0)
    model.decay = torch.nn.Parameter(torch.ones(5, device="cpu"), requires_grad=False)
    specs = (*LAYOUT.specs, ParamSpec("decay", "float32", (5,)))

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        *experts, (_, decay) = weights
        model.load_weights(experts)
        model.decay.data.copy_(decay)

    plan = learn(model, load, specs)
    assert [copy.target for copy in plan.copies] == ["weight", "weight", "decay"]
    assert plan.unlearned == ()


def test_large_version_whose_loader_looks_at_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "WHOLE_BYTES", LAYOUT.num_bytes)
    assert learned(bare(2, looks=True), lambda: Experts(2, looks=True), LAYOUT).copies
    monkeypatch.setattr(learning, "WHOLE_BYTES", LAYOUT.num_bytes - 1)
    with pytest.raises(WeightUpdateError, match=says("do not run without memory", "moe-backend")):
        learned(bare(2, looks=True), lambda: Experts(2, looks=True), LAYOUT)


def test_32_gib_are_the_most_that_every_worker_holds_whole() -> None:
    learning.refuse_large(Layout((ParamSpec("w", "uint8", (32 << 30,)),)), "-")
    with pytest.raises(WeightUpdateError, match=says("32 GiB", "moe-backend")):
        learning.refuse_large(Layout((ParamSpec("w", "uint8", ((32 << 30) + 1,)),)), "-")


def test_tensors_that_the_loader_refuses_are_refused_with_its_reason() -> None:
    wrong = Layout((ParamSpec("expert.0", "float32", (3, 6)),))
    with pytest.raises(WeightUpdateError, match=says("refuses the weights", "RuntimeError")):
        learned(bare(0), lambda: Experts(0), wrong)
