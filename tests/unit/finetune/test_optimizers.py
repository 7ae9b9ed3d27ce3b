"""Optimizers by name: their options, their states through a checkpoint, and what is refused."""

import sys

import pytest
import torch

from pipelinerl.config.engine import traits_of
from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.engines import Engine, build_engine
from pipelinerl.finetune.engines.optimizers import set_rate
from pipelinerl.finetune.model import Policy
from tests.models import make_qwen2

CPU = torch.device("cpu")
REQUIRED = ["output_dir=unused", "model_path=unused", "dataset_loader=a.b", "actor.rollout_policy=a.b"]
FLAT = "finetune.gradient_clipping_threshold=null"


def config(*overrides: str) -> Config:
    return parse(compose("base", [*REQUIRED, FLAT, *overrides]))


def engine(name: str, *overrides: str) -> Engine:
    policy = Policy(make_qwen2(64), chunk=16)
    return build_engine("ddp", policy, config(f"finetune.optimizer.name={name}", *overrides), CPU)


def step(one: Engine, seed: int, rate: float = 1e-2) -> None:
    """A step on gradients that only the seed decides."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in one.trained.values():  # type: ignore[attr-defined]
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    one.step(rate)


def parameters(one: Engine) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.policy.parameters()]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_class_of_torch_makes_its_own_steps() -> None:
    ours = engine("torch.optim.SGD", "+finetune.optimizer.kwargs.momentum=0.9")
    before = parameters(ours)
    reference = [torch.nn.Parameter(values.clone()) for values in before]
    theirs = torch.optim.SGD(reference, lr=1e-2, momentum=0.9)
    assert equal(parameters(ours), before), "states are made without a step"
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        for parameter in reference:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        theirs.step()
        step(ours, seed)
    assert equal(parameters(ours), [parameter.detach() for parameter in reference])


def test_muon_steps_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    ours = engine("muon", "+finetune.optimizer.kwargs.momentum=0.8", "finetune.optimizer.betas=[0.8,0.9]")
    names = [name for name, _ in ours.policy.named_parameters()]
    reference = [torch.nn.Parameter(values) for values in parameters(ours)]
    is_matrix = [".layers." in name and p.ndim == 2 for name, p in zip(names, reference, strict=True)]
    assert 0 < sum(is_matrix) < len(names)
    matrices = [p for p, is_one in zip(reference, is_matrix, strict=True) if is_one]
    rest = [p for p, is_one in zip(reference, is_matrix, strict=True) if not is_one]
    theirs = (
        torch.optim.Muon(matrices, weight_decay=0.0, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.8, 0.9), weight_decay=0.0),
    )
    for seed, rate in enumerate((1e-2, 1e-3)):
        generator = torch.Generator().manual_seed(seed)
        for parameter in reference:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in theirs:
            set_rate(optimizer, rate)
            optimizer.step()
        step(ours, seed, rate)
    assert equal(parameters(ours), [parameter.detach() for parameter in reference])


def test_muon_is_refused_where_matrices_are_sharded() -> None:
    refusal = traits_of("fsdp2").check(config("finetune.optimizer.name=muon"))
    assert refusal == "`finetune.optimizer.name` is muon, whose steps need whole matrices: set `finetune.engine` to ddp"


NAMES = [
    ("adamw", ()),
    ("muon", ()),
    ("torch.optim.SGD", ("+finetune.optimizer.kwargs.momentum=0.9",)),
    ("torch.optim.Adafactor", ()),
    ("torch.optim.NAdam", ()),
    ("torch.optim.RMSprop", ()),
    ("bitsandbytes.optim.AdamW8bit", ("+finetune.optimizer.kwargs.min_8bit_size=512",)),
    ("bitsandbytes.optim.Lion8bit", ("+finetune.optimizer.kwargs.min_8bit_size=512",)),
]


@pytest.mark.parametrize(("name", "overrides"), NAMES)
def test_states_of_a_checkpoint_continue_bit_for_bit(name: str, overrides: tuple[str, ...]) -> None:
    pytest.importorskip(name.partition(".")[0]) if "." in name else None
    whole = engine(name, *overrides)
    for seed in range(3):
        step(whole, seed)
    resumed = engine(name, *overrides)
    saved = {key: piece.tensor.clone() for key, piece in whole.pieces().items()}
    assert saved.keys() == resumed.pieces().keys()
    for key, piece in resumed.pieces().items():
        piece.tensor.copy_(saved[key])
    resumed.loaded(3)
    for seed in range(3, 6):
        step(whole, seed)
        step(resumed, seed)
    assert equal(parameters(whole), parameters(resumed))


def test_rate_in_a_tensor_is_filled_so_that_a_compiled_step_reads_it() -> None:
    rate = torch.tensor(1e-3)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=rate, capturable=False, foreach=False)
    set_rate(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


class NoOptimizer:
    """Importable, and nothing to train with."""


REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("torch.optim.Nothing", (), r"`torch.optim.Nothing` does not exist"),
    ("no_such_package.Adam", (), "no module 'no_such_package'"),
    (f"{__name__}.NoOptimizer", (), r"it is no torch.optim.Optimizer"),
    ("torch.optim.SGD", ("+finetune.optimizer.kwargs.momentun=0.9",), "momentun"),
    ("torch.optim.Muon", (), "only supports 2D parameters"),
    ("torch.optim.Rprop", ("finetune.optimizer.weight_decay=0.1",), "it has no weight decay"),
]


@pytest.mark.parametrize(("name", "overrides", "said"), REFUSED)
def test_optimizer_that_cannot_be_is_refused(name: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine(name, *overrides)


def test_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match="`pip install bitsandbytes` brings it"):
        engine("bitsandbytes.optim.AdamW8bit")
