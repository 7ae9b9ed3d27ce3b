"""The swap on the device: captured graphs read new weights, pinned memory is as large as asked.

`tests/integration/test_swap.py` has the same logic on the CPU.
"""

import pytest
import torch
from torch import nn

from pipelinerl.weights.pinned import pinned
from tests.gpu.device import DEVICE, needs_kernels
from tests.integration.test_swap import CONFIG, Model, Update, sent, staged

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def swapped_in(update: Update, live: nn.Module, buffer: torch.Tensor) -> None:
    from pipelinerl.weights.load.swap import Swap

    swap = Swap.of(live, update.bare, CONFIG, DEVICE)
    copies = [copy for copy in update.copies if copy.target == "qk"]
    swap.prepare(copies, buffer)
    swap.swap()


@needs_kernels
@pytest.mark.parametrize("is_pinned", [True, False])
def test_captured_graph_multiplies_with_the_new_weights(is_pinned: bool) -> None:
    from pipelinerl.weights.load.swap import Census

    update, live, inputs = Update(), Model().to(DEVICE), torch.eye(4, device=DEVICE)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        nn.functional.linear(inputs, live.qk)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        product = nn.functional.linear(inputs, live.qk)
    census = Census(live)
    before, (_, host) = census.take(), staged(sent(1))
    buffer = pinned(host.numel()).copy_(host) if is_pinned else host.to(DEVICE)
    swapped_in(update, live, buffer)
    census.check(before, captures_graphs=True)
    graph.replay()
    assert torch.equal(product.t().cpu(), torch.cat((sent(1)["q"], sent(1)["k"])))


def test_copies_within_the_device_are_exact() -> None:
    update, live = Update(), Model().to(DEVICE)
    swapped_in(update, live, staged(sent(2))[1].to(DEVICE))
    assert torch.equal(live.qk.cpu(), torch.cat((sent(2)["q"], sent(2)["k"])))


@needs_kernels
@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch rounds")
def test_pinned_memory_takes_what_was_asked_for() -> None:
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    held = pinned((17 << 20) + 64)
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    assert held.is_pinned()
    assert taken <= held.numel() + (1 << 20)
