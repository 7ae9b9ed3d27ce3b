"""The chunked output head: exact against the naive form, and small."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.finetune.rl.head import LogitMap, OutputHead, head_logprobs, head_loss
from pipelinerl.finetune.rl.objective import LossSettings, PolicyObjective
from pipelinerl.finetune.rl.tokens import TokenInputs


def make_inputs(count: int, dtype: torch.dtype = torch.float32) -> TokenInputs:
    generator = torch.Generator().manual_seed(5)
    return TokenInputs(
        sampler_logprobs_K=(-3 - torch.rand(count, generator=generator)).to(dtype),
        advantages_K=torch.randn(count, generator=generator).to(dtype),
        weights_K=torch.full((count,), 1 / max(count, 1), dtype=dtype),
        segments_K=torch.arange(count) // 16,
        num_segments=-(-count // 16),
    )


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunked_logprobs_and_entropy_equal_naive(chunk: int) -> None:
    torch.manual_seed(0)
    head = OutputHead.wrap(nn.Linear(32, 5000, bias=False))
    hidden, targets = torch.randn(64, 32) * 3, torch.randint(0, 5000, (64,))
    logprobs, entropy = head_logprobs(head, hidden, targets, temperature=0.8, chunk=chunk, fp32=True)

    naive = (hidden @ head.weight.T / 0.8).log_softmax(-1)
    expected = naive.gather(1, targets[:, None])[:, 0]
    assert ((logprobs - expected) / expected).abs().max() <= 1e-6
    expected_entropy = -(naive.exp() * naive).sum(-1)
    assert ((entropy - expected_entropy) / expected_entropy).abs().max() <= 5e-6


def test_head_without_loss_arguments_gives_plain_logits() -> None:
    linear = nn.Linear(8, 11)
    hidden = torch.randn(3, 8)
    assert torch.equal(OutputHead.wrap(linear)(hidden), linear(hidden))


def test_wrapped_head_keeps_the_same_parameters() -> None:
    linear = nn.Linear(8, 11)
    head = OutputHead.wrap(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert (head.in_features, head.out_features) == (8, 11)


def test_bfloat16_weights_give_float32_logprobs() -> None:
    torch.manual_seed(0)
    head = OutputHead.wrap(nn.Linear(64, 1000, bias=False, dtype=torch.bfloat16))
    hidden, targets = torch.randn(20, 64, dtype=torch.bfloat16), torch.randint(0, 1000, (20,))
    logprobs, _ = head_logprobs(head, hidden, targets, temperature=1.0, chunk=8, fp32=True)
    exact = (hidden.double() @ head.weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    assert (logprobs - exact).abs().max() <= 1e-5


def test_autocast_multiplies_the_rounded_weights_that_servers_get() -> None:
    """The weights stay in float32: their gradient too."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 1000, bias=False)
    head, hidden = OutputHead.wrap(linear), torch.randn(20, 64, requires_grad=True)
    targets = torch.randint(0, 1000, (20,))
    objective = PolicyObjective(make_inputs(20), LossSettings())
    with torch.autocast("cpu", torch.bfloat16):
        output = head_loss(head, hidden, targets, objective, temperature=1.0, chunk=8, fp32=True)
    exact = (hidden.bfloat16().double() @ linear.weight.bfloat16().double().T).log_softmax(-1)
    plain = (hidden.double() @ linear.weight.double().T).log_softmax(-1)
    differences = [(output.logprobs_K - x.gather(1, targets[:, None])[:, 0]).abs().max() for x in (exact, plain)]
    assert differences[0] <= 1e-5
    assert differences[1] > 1e-3
    output.loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == hidden.grad.dtype == torch.float32


@pytest.mark.parametrize("entropy_bonus", [0.0, 0.1])
@pytest.mark.parametrize("logit_map", [LogitMap(scale=0.3), LogitMap(softcap=2.0), LogitMap(scale=1.7, softcap=2.0)])
def test_scaled_and_capped_logits_have_the_gradient_of_autograd(logit_map: LogitMap, entropy_bonus: float) -> None:
    """Against the same objective over log-probs and entropy written out in float64."""
    torch.manual_seed(0)
    count, chunk = 20, 8
    linear = nn.Linear(6, 11, dtype=torch.float64)
    head, targets = OutputHead.wrap(linear, logit_map), torch.randint(0, 11, (count,))
    hidden = (3 * torch.randn(count, 6, dtype=torch.float64)).requires_grad_()
    objective = PolicyObjective(make_inputs(count, torch.float64), LossSettings(entropy_bonus=entropy_bonus))
    output = head_loss(head, hidden, targets, objective, temperature=0.8, chunk=chunk, fp32=True)
    ours = torch.autograd.grad(output.loss, [hidden, linear.weight, linear.bias])

    products = (hidden @ linear.weight.T + linear.bias) * logit_map.scale
    if logit_map.softcap is not None:
        products = logit_map.softcap * torch.tanh(products / logit_map.softcap)
    logprobs = (products / 0.8).log_softmax(-1)
    chosen, entropy = logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(output.logprobs_K, chosen.detach(), rtol=1e-10, atol=1e-10)
    expected = torch.autograd.grad(objective(chosen, entropy, 0), [hidden, linear.weight, linear.bias])
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-10)


def test_no_trained_token_gives_zero_loss_and_zero_gradients() -> None:
    head = OutputHead.wrap(nn.Linear(4, 9))
    hidden = torch.zeros(0, 4, requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64)
    objective = PolicyObjective(make_inputs(0), LossSettings())
    output = head_loss(head, hidden, targets, objective, temperature=1.0, chunk=8, fp32=True)
    output.loss.backward()
    assert output.loss.item() == 0
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


@pytest.mark.parametrize("policy_loss", ["reinforce", "gspo"])
def test_frozen_head_gets_no_gradient_but_hidden_states_do(policy_loss: str) -> None:
    head = OutputHead.wrap(nn.Linear(4, 9, bias=False))
    head.weight.requires_grad_(False)
    hidden = torch.randn(20, 4, requires_grad=True)
    objective = PolicyObjective(make_inputs(20), LossSettings(policy_loss=policy_loss))
    targets = torch.randint(0, 9, (20,))
    head_loss(head, hidden, targets, objective, temperature=1.0, chunk=8, fp32=True).loss.backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    assert hidden.grad.abs().max() > 0


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes in storages that were made inside and were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        old = {x.untyped_storage()._cdata for x in given}
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage(), old)
        return result

    def _track(self, storage: torch.UntypedStorage, old: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in old:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(function: Callable[[], object]) -> int:
    with PeakBytes() as mode:
        function()
    return mode.peak


@pytest.mark.parametrize(
    ("policy_loss", "dtype"),
    [
        ("reinforce", torch.float32),
        ("gspo", torch.bfloat16),
        pytest.param("reinforce", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("gspo", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_peak_memory_is_below_a_tenth_of_the_naive_logits(policy_loss: str, dtype: torch.dtype) -> None:
    """At full size, on tensors without contents: every operation is dispatched, none is computed.

    A tenth leaves the bound on a GPU, an eighth, room for cuBLAS's workspace. Products stay in bfloat16, as there.
    """
    count, vocab, width = 16_384, 152_064, 896
    with FakeTensorMode():
        head = OutputHead.wrap(nn.Linear(width, vocab, bias=False, dtype=dtype))
        hidden = torch.randn(count, width, requires_grad=True, dtype=dtype)
        targets = torch.randint(0, vocab, (count,))
        wide = dtype == torch.float32
        settings = LossSettings(policy_loss=policy_loss, entropy_bonus=0.01)
        objective = PolicyObjective(make_inputs(count), settings)

        def ours() -> None:
            output = head_loss(head, hidden, targets, objective, temperature=1.0, chunk=256, fp32=wide)
            output.loss.backward()

        def naive() -> None:
            (hidden.float() @ head.weight.float().T).log_softmax(-1).gather(1, targets[:, None]).sum().backward()

        logits = 4 * count * vocab
        assert peak_bytes(naive) >= 2 * logits  # the instrument sees what it should
        head.weight.grad = hidden.grad = None
        assert peak_bytes(ours) <= logits / 10  # the gradient of the head's weight included
