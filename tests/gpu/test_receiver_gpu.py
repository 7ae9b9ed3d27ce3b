"""A server's side on the device: checksum, delta and layout of a staged update."""

import pytest
import torch

from pipelinerl.weights.layout import Layout
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.transfer.checksum import checksum
from pipelinerl.weights.transfer.delta import apply_delta, encode_delta
from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu
LAYOUT = Layout((ParamSpec("a", "bfloat16", (1000, 33)), ParamSpec("b", "bfloat16", (7,))))


def staged(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    buffer = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)
    for _, view in LAYOUT.views(buffer):
        view.copy_(torch.randn(view.shape, generator=generator))
    return buffer


def test_checksum_on_the_device_is_that_of_the_host() -> None:
    assert checksum(staged(0).to(DEVICE)) == checksum(staged(0))


def test_delta_applied_on_the_device_gives_the_same_bytes() -> None:
    before, after = staged(0), staged(0)
    for _, view in LAYOUT.views(after):
        view.view(-1)[::5] += 1
    delta = encode_delta(before, after)
    assert delta is not None
    on_device = before.to(DEVICE)
    apply_delta(on_device, delta)
    assert torch.equal(on_device.cpu(), after)
