"""Schedules of the learning rate and of the loss coefficients, by hand."""

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config, FinetuneSection
from pipelinerl.finetune.learning_rate import learning_rate
from pipelinerl.finetune.rl.objective import settings_at


def make_config(*overrides: str) -> Config:
    base = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "finetune.learning_rate=1.0"]
    return parse(compose("base", [*base, *(f"finetune.{o}" for o in overrides)]))


def make(*overrides: str) -> FinetuneSection:
    return make_config(*overrides).finetune


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("constant_with_warmup", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1, 0.8535533905932737, 0.5, 0.14644660940672627]),
    ],
)
def test_learning_rate_follows_its_schedule(kind: str, expected: list[float]) -> None:
    finetune = make(f"lr_scheduler_type={kind}", "num_warmup_steps=2", "max_train_steps=6")
    assert [learning_rate(finetune, step) for step in range(6)] == pytest.approx(expected)


def test_coefficients_decay_linearly_to_their_final_values() -> None:
    overrides = ("max_train_steps=5", "rl.kl_coef=0.4", "rl.final_kl_coef=0.0", "rl.entropy_bonus=0.1")
    cfg = make_config(*overrides)
    assert [settings_at(cfg, step).kl_coef for step in range(5)] == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0])
    assert settings_at(cfg, 4).entropy_bonus == pytest.approx(0.1)
