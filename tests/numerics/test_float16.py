"""float16: gradients are scaled before they are rounded, and a step whose gradient overflows changes no weight."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.synthetic_batches import make_samples, pack
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import RecordError
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch, train_step
from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.engines import Engine, build_engine
from pipelinerl.finetune.engines.stepping import FIRST_SCALE, next_scaling
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.head import OutputHead, head_loss
from pipelinerl.finetune.rl.objective import LossSettings, PolicyObjective
from pipelinerl.finetune.rl.tokens import TokenInputs
from pipelinerl.finetune.saving import Saver, SaveRules
from pipelinerl.observability.catalogue import TrainerMetric
from tests.models import make_qwen2

CPU = torch.device("cpu")
RULES = BatchRules(vocab_size=64, max_lag_steps=None, layout="packed", tokens_per_attention_unit=0)
RECORD = pack(make_samples(0, 4, vocab_size=64, lengths=(5, 9)), [range(4)])[0]


def make_engine(name: str, dtype: str = "float16") -> Engine:
    required = ["output_dir=unused", "model_path=unused", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
    cfg = parse(compose("base", [*required, f"finetune.dtype={dtype}", f"finetune.engine={name}"]))
    return build_engine(name, Policy(make_qwen2(64), chunk=16), cfg, CPU)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradient(engine: Engine) -> Tensor:
    engine.backward(engine.forward(prepare_batch(RECORD, RULES, CPU), LossSettings()).loss, last=True)
    found = [whole(p.grad).flatten() for p in engine.policy.parameters() if p.grad is not None]
    return torch.cat(found) / engine.policy.loss_scale


def set_scaling(engine: Engine, scale: float, steps: int = 0, skipped: int = 0, num_steps: int = 0) -> None:
    assert engine.scaling is not None
    engine.scaling.copy_(torch.tensor([scale, steps, skipped]))
    engine.loaded(num_steps)


@pytest.mark.parametrize(("scale", "least", "most"), [(2.0**16, 0.0, 0.01), (1.0, 0.9, 1.1)])
def test_small_gradients_of_a_half_precision_head_need_the_scale(scale: float, least: float, most: float) -> None:
    """Against float64. A token weighs 1e-6: its gradient over 1,000 words is below what float16 represents."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 1000, bias=False, dtype=torch.float16)
    linear.weight.data = torch.randn(1000, 64, generator=generator).to(torch.float16) / 8
    hidden = torch.randn(20, 64, generator=generator).to(torch.float16)
    targets = torch.randint(0, 1000, (20,), generator=generator)
    found = []
    for dtype, factor in ((torch.float16, scale), (torch.float64, 1.0)):
        inputs = TokenInputs(
            sampler_logprobs_K=torch.full((20,), -3.0),
            advantages_K=torch.ones(20),
            weights_K=torch.full((20,), 1e-6),
            segments_K=torch.arange(20),
            num_segments=20,
        )
        states = hidden.to(dtype).detach().requires_grad_()
        head = OutputHead.wrap(linear.to(dtype))
        objective = PolicyObjective(inputs, LossSettings())
        output = head_loss(head, states, targets, objective, temperature=1.0, chunk=8, fp32=False, loss_scale=factor)
        (output.loss * factor).backward()
        assert states.grad is not None
        found.append(states.grad.double() / factor)
    error = float((found[0] - found[1]).norm() / found[1].norm())
    assert least <= error <= most


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_gradient_is_near_that_of_float32(name: str, one_rank: None) -> None:
    engine, expected = make_engine(name), gradient(make_engine("ddp", "float32"))
    assert engine.policy.loss_scale == FIRST_SCALE
    set_scaling(engine, 2.0**10)
    assert (gradient(engine) - expected).norm() <= 0.01 * expected.norm()
    assert engine.step(0.0) == pytest.approx(float(expected.norm()), rel=0.01)
    assert engine.scaling is not None
    assert engine.scaling.tolist() == [2.0**10, 1, 0]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_overflow_skips_the_step_halves_the_scale_and_is_counted(name: str, one_rank: None) -> None:
    engine = make_engine(name)
    set_scaling(engine, 2.0**60, steps=5)
    before = [whole(p).detach().clone() for p in engine.policy.parameters()]
    metrics = train_step(engine, [RECORD], LossSettings(), RULES, 0.1)
    assert all(torch.equal(whole(p), old) for p, old in zip(engine.policy.parameters(), before, strict=True))
    assert metrics[TrainerMetric.LOSS_SCALE] == engine.policy.loss_scale == 2.0**59
    assert metrics[TrainerMetric.SKIPPED_STEPS] == 1
    assert TrainerMetric.GRAD_NORM not in metrics


def test_gradient_that_is_not_finite_without_a_scale_is_refused() -> None:
    engine = make_engine("ddp")
    next(engine.policy.parameters()).data.fill_(float("nan"))
    set_scaling(engine, 2.0)
    train_step(engine, [RECORD], LossSettings(), RULES, 0.1)
    assert engine.policy.loss_scale == 1
    with pytest.raises(RecordError, match="the gradient norm is nan"):
        train_step(engine, [RECORD], LossSettings(), RULES, 0.1)


def test_scale_doubles_after_2000_steps_without_overflow() -> None:
    scaling = torch.tensor([8.0, 1998, 3])
    scaling = next_scaling(scaling, overflows=False)
    assert scaling.tolist() == [8, 1999, 3]
    assert next_scaling(scaling, overflows=False).tolist() == [16, 0, 3]
    assert next_scaling(scaling, overflows=True).tolist() == [4, 0, 4]


def test_checkpoint_keeps_the_scale_and_the_optimizers_own_steps(tmp_path: Path) -> None:
    """Two of seven steps were skipped, so AdamW corrects its moments for five."""

    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None: ...

    def saver(engine: Engine) -> Saver:
        return Saver(engine, SaveRules(run_dir=tmp_path, dtype=torch.float16, keep=2, keep_exports=None), Tokenizer())

    engine, resumed = make_engine("ddp"), make_engine("ddp")
    set_scaling(engine, 2.0**20, steps=9, skipped=2, num_steps=7)
    saving = saver(engine)
    saving.start(Counters(step=7), export=False)
    saving.finish()
    saving.close()
    saving = saver(resumed)
    assert saving.resume() == Counters(step=7)
    saving.close()
    assert resumed.scaling is not None
    assert resumed.scaling.tolist() == [2.0**20, 9, 2]
    assert resumed.policy.loss_scale == 2.0**20
    assert {float(state["step"]) for state in resumed.optimizer.state.values()} == {5.0}  # type: ignore[attr-defined]
