"""Packed attention on the device: torch's varlen kernel beside one call per document."""

import pytest
import torch

from pipelinerl.finetune import attention
from pipelinerl.finetune.attention import Documents, announce, packed_attention
from tests.gpu.device import DEVICE, needs_kernels

pytestmark = pytest.mark.gpu
DOCUMENTS = (100, 1, 700, 223)


class Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("value_size", [64, 48])
def test_varlen_kernel_is_near_one_call_per_document(
    window: int | None, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    length = sum(DOCUMENTS)
    shapes = ((1, 8, length, 64), (1, 2, length, 64), (1, 2, length, value_size))
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    found = []
    for has_kernel in (True, False):
        if not has_kernel:
            monkeypatch.setattr(attention, "_has_kernel", lambda *_: False)
        announce(DOCUMENTS, DEVICE)
        output, _ = packed_attention(Layer(), *inputs, None, sliding_window=window)  # type: ignore[call-arg]
        found.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    for kernel, reference in zip(*found, strict=True):
        assert (kernel.float() - reference.float()).norm() <= 0.02 * reference.float().norm()


@needs_kernels
@pytest.mark.parametrize("window", [None, 64])
def test_varlen_kernel_takes_the_last_queries_of_documents(window: int | None) -> None:
    """As sequence parallelism cuts them: each part's last query is at the place of its last key."""
    torch.manual_seed(0)
    documents = Documents((100, 1, 300), (500, 1, 300), DEVICE)
    shapes = ((1, 8, 401, 64), (1, 2, 801, 64), (1, 2, 801, 64))
    inputs = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    scoring = attention._Scoring(scale=0.125, window=window, softcap=None, sinks_H=None, dropout=0.0)
    found = []
    for attend in (attention._varlen, attention._attend_documents):
        output = attend(*inputs, scoring, documents)  # type: ignore[call-arg]
        found.append((output, *torch.autograd.grad(output.float().square().sum(), inputs)))
    for kernel, reference in zip(*found, strict=True):
        assert (kernel.float() - reference.float()).norm() <= 0.02 * reference.float().norm()
