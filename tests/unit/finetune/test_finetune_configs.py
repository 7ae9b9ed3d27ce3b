"""Every file of conf/finetune composes into a valid configuration."""

import pytest

from pipelinerl.config.load import CONF_DIR, compose, validate
from pipelinerl.config.sections import Config
from pipelinerl.finetune.rl.objective import settings_at

NAMES = sorted(path.stem for path in (CONF_DIR / "finetune").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_finetune_group_composes(name: str) -> None:
    overrides = [f"finetune={name}", "output_dir=x", "dataset_loader=os.getcwd", "actor.rollout_policy=os.getcwd"]
    cfg = validate(compose("base", overrides))
    assert settings_at(cfg, 0).policy_loss == cfg.finetune.rl.policy_loss


def test_the_algorithms_users_expect_are_there() -> None:
    assert {"base", "grpo", "ppo", "gspo", "decoupled_ppo", "actor_critic"} <= set(NAMES)


def test_presets_say_what_they_promise() -> None:
    def preset(name: str, *overrides: str) -> Config:
        required = ["output_dir=x", "dataset_loader=os.getcwd", "actor.rollout_policy=os.getcwd"]
        return validate(compose("base", [f"finetune={name}", *required, *overrides]))

    assert preset("scalerl").preprocess.filter_zero_advantage_groups
    assert not preset("base").preprocess.filter_zero_advantage_groups
    phase = ("schedule=conventional", "steps_per_phase=4")
    assert [preset(name, *phase).proximal_steps for name in ("gspo", "decoupled_ppo", "ppo")] == [4, 4, None]
    assert [preset(name).proximal_steps for name in ("gspo", "decoupled_ppo", "ppo")] == [4, 1, None]
