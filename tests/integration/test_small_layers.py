"""Which layers of a CPU server are packed, and that both kinds multiply rightly."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipelinerl.weights.load.plugin import SMALL, multiply_small_layers_plainly

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
Dispatch = Callable[[nn.Module, bool], None]


@pytest.fixture
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Dispatch:
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    multiply_small_layers_plainly()
    multiply_small_layers_plainly()  # vLLM may load plugins more than once
    return utils.dispatch_cpu_unquantized_gemm


@pytest.mark.parametrize(("rows", "is_packed"), [(SMALL // 64, False), (SMALL // 64 + 64, True)])
def test_small_layers_keep_their_weight(dispatch: Dispatch, rows: int, is_packed: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, rows)
    layer.requires_grad_(False)
    weight, inputs = layer.weight.double(), torch.randn(37, 64)
    dispatch(layer, True)
    assert (layer.weight.numel() == 0) == is_packed
    product = layer.cpu_linear(inputs, layer.weight, layer.bias)
    torch.testing.assert_close(product.double(), inputs.double() @ weight.T + layer.bias.double(), atol=1e-5, rtol=0)


def test_bfloat16_layers_stay_with_vllm(dispatch: Dispatch) -> None:
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    layer.requires_grad_(False)
    dispatch(layer, True)
    assert layer.cpu_linear is not nn.functional.linear
