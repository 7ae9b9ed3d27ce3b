"""Divided experts: places of a rank's part, and two ranks that exchange tokens, as threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LongcatFlashConfig, Qwen3MoeConfig
from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.architecture import examine
from pipelinerl.finetune.engines.experts import ExpertGroup, divide_experts, expert_modules
from pipelinerl.finetune.pieces import Piece
from tests.models import make_qwen2
from tests.says import says

NO_MESH: Any = None
EXPERTS, HIDDEN, CHOSEN = 6, 4, 2
LONGCAT = LongcatFlashConfig(hidden_size=4, expert_ffn_hidden_size=4, n_routed_experts=4, zero_expert_num=2)


def group_of(index: int, size: int, link: Any = None) -> ExpertGroup:
    return ExpertGroup(link, index, size, NO_MESH)


def test_parts_of_all_ranks_cover_the_parameter_once() -> None:
    """6 experts of 2 numbers each: 2 ranks divide them, and 2 others shard each part in rows of 2 and 1 experts."""
    ranges = [
        group_of(index, 2).piece_of_whole(Piece(torch.empty(2 * rows), start, whole=6))
        for index in range(2)
        for start, rows in ((0, 2), (4, 1))
    ]
    assert [(piece.start, len(piece.tensor), piece.whole) for piece in ranges] == [
        (0, 4, 12),
        (4, 2, 12),
        (6, 4, 12),
        (10, 2, 12),
    ]


class Link:
    """All-to-all between threads: each puts what it sends, and takes it when all have."""

    def __init__(self, size: int):
        self._sent: dict[int, list[Tensor]] = {}
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, out: Tensor, parts: list[Tensor]) -> None:
        self._sent[rank] = parts
        self._barrier.wait()
        torch.cat([self._sent[sender][rank] for sender in sorted(self._sent)], out=out)
        self._barrier.wait()


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ExpertGroup], Any]], list[Any]]:
    """Runs a function in two threads, each with its group."""

    def all_to_all(out: Tensor, rows: Tensor, received: Any = None, sent: Any = None, group: Any = None) -> None:
        link, rank = group
        link.exchange(rank, out, list(rows.detach().split(sent if sent is not None else len(rows) // 2)))

    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)

    def run(function: Callable[[ExpertGroup], Any]) -> list[Any]:
        link = Link(2)
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(lambda rank: function(group_of(rank, 2, (link, rank))), range(2)))

    return run


class Mixture(nn.Module):
    """Experts of transformers under the name that its models give them."""

    def __init__(self, implementation: str):
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=4)
        config._experts_implementation = implementation
        self.experts = Qwen3MoeExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter)


def tokens_of(rank: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """States, choice among the first so many experts, weights. Ranks have different numbers of tokens."""
    generator, count = torch.Generator().manual_seed(rank), 5 + 2 * rank
    states = torch.randn(count, HIDDEN, generator=generator)
    chosen = torch.rand(count, experts, generator=generator).topk(CHOSEN).indices
    return states.requires_grad_(), chosen, torch.rand(count, CHOSEN, generator=generator).requires_grad_()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("visited", [EXPERTS, EXPERTS // 2])  # half: no token comes to the second rank
def test_outputs_and_gradients_are_those_of_whole_experts(
    implementation: str, visited: int, two_ranks: Callable[..., list[Any]]
) -> None:
    def run(mixture: Mixture, rank: int, group: ExpertGroup | None) -> list[Tensor]:
        inputs = tokens_of(rank, visited)
        if group is not None:
            divide_experts(mixture, group)
        made = mixture.experts(*inputs)
        made.square().sum().backward()
        learned = [inputs[0], inputs[2], *mixture.experts.parameters()]
        return [made.detach(), *(tensor.grad for tensor in learned if tensor.grad is not None)]

    mixtures = [Mixture(implementation) for _ in range(4)]  # here, because threads share the random generator
    ours = two_ranks(lambda group: run(mixtures[group.index], group.index, group))
    whole = [run(mixtures[2 + rank], rank, None) for rank in range(2)]
    for mine, theirs in zip(ours, whole, strict=True):  # output, gradients of states and of weights
        torch.testing.assert_close(mine[:3], theirs[:3], rtol=1e-5, atol=1e-6)
    for number in range(3, len(whole[0])):  # gradients of the experts, each rank's of its own
        expected = sum(theirs[number] for theirs in whole)
        torch.testing.assert_close(torch.cat([mine[number] for mine in ours]), expected, rtol=1e-5, atol=1e-5)


def test_check_before_the_start_refuses_experts_that_cannot_be_divided(tmp_path: Path) -> None:
    make_qwen2(64).config.save_pretrained(tmp_path)
    assert examine(tmp_path).attention
    with pytest.raises(ConfigError, match=says("finetune.expert_ranks", "no experts")):
        examine(tmp_path, divides_experts=True)


def test_model_whose_experts_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("finetune.expert_ranks", "no experts")):
        expert_modules(make_qwen2(64))
    with pytest.raises(ConfigError, match=says("4", "6 experts")):
        divide_experts(Mixture("eager"), group_of(0, 4))
    listed = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)])})
    with pytest.raises(ConfigError, match=says("ModuleList does not take the router's choice")):
        expert_modules(listed)


@pytest.mark.parametrize(
    ("experts", "kept"),
    [
        (DbrxExperts(DbrxFFNConfig(hidden_size=4, ffn_hidden_size=4, moe_num_experts=2)), "mlp.w1 with 8 rows"),
        (LongcatFlashExperts(LONGCAT), "gate_up_proj with 6 rows"),
    ],
    ids=["in a module of their own", "some without parameters"],
)
def test_experts_whose_parameters_are_not_divided_by_experts_are_refused(experts: nn.Module, kept: str) -> None:
    message = says(type(experts).__name__, f"keeps {kept}", "set it to null")
    with pytest.raises(ConfigError, match=message):
        divide_experts(nn.ModuleDict({"experts": experts}), group_of(0, 2))
