"""Intervals in samples become optimizer steps of the run's own batch."""

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
BATCH_OF_1024 = ["finetune.train_batch_size=4", "finetune.gradient_accumulation_passes=256"]


@pytest.mark.parametrize(
    ("key", "given", "steps"),
    [
        ("eval_every_n_versions", "20000 samples", 20),  # 19.53 steps: all of it has passed after the 20th
        ("eval_every_n_versions", "1024 samples", 1),
        ("eval_every_n_versions", "0 samples", 0),
        ("finetune.weight_update_interval", "1025 samples", 2),
        ("max_lag_steps", "2047 samples", 1),  # a bound is not exceeded
        ("max_lag_steps", "null", None),
    ],
)
def test_samples_become_steps(key: str, given: str, steps: int | None) -> None:
    config: object = parse(compose("base", [*REQUIRED, *BATCH_OF_1024, f"{key}={given}"]))
    for part in key.split("."):
        config = getattr(config, part)
    assert config == steps


@pytest.mark.parametrize("given", ["20000 tokens", "often", "-1 samples", "1.5 samples"])
def test_other_units_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=says("`eval_every_n_versions`", "optimizer steps")):
        parse(compose("base", [*REQUIRED, f"eval_every_n_versions='{given}'"]))


def test_samples_without_a_batch_are_refused_by_its_key() -> None:
    overrides = [*REQUIRED, "finetune.train_batch_size=0", "eval_every_n_versions=20 samples"]
    with pytest.raises(ConfigError, match=r"`finetune\.train_batch_size` is 0"):
        parse(compose("base", overrides))
