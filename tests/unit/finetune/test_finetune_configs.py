"""Every file of conf/finetune composes into a valid configuration."""

import pytest

from pipelinerl.config.load import CONF_DIR, compose, validate
from pipelinerl.finetune.rl.objective import settings_at

NAMES = sorted(path.stem for path in (CONF_DIR / "finetune").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_finetune_group_composes(name: str) -> None:
    overrides = [f"finetune={name}", "output_dir=x", "dataset_loader=os.getcwd", "actor.rollout_policy=os.getcwd"]
    cfg = validate(compose("base", overrides))
    assert settings_at(cfg, 0).policy_loss == cfg.finetune.rl.policy_loss


def test_the_algorithms_users_expect_are_there() -> None:
    assert {"base", "grpo", "ppo", "gspo", "decoupled_ppo", "actor_critic"} <= set(NAMES)
