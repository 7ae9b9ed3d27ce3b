"""The configuration's surface: names that users know stay, YAML and types agree, and every key does something."""

import re
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.keys import declared
from pipelinerl.config.load import CONF_DIR, compose, config_keys, parse
from pipelinerl.config.paths import search_path
from pipelinerl.config.sections import Config

ROOT = CONF_DIR.parent
EXPERIMENTS = sorted(path for folder in search_path(own=False) for path in folder.glob("*.yaml"))
REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
KNOWN_TO_USERS = [
    "output_dir",
    "model_path",
    "attempts",
    "seed",
    "actor.rollout_policy",
    "actor.llm_max_rollouts",
    "actor.rollout_workers",
    "dataset_loader",
    "dataset_loader_params",
    "train_dataset_names",
    "test_dataset_names",
    "environment",
    "eval_every_n_versions",
    "llm.parameters",
    "test_llm.parameters",
    "vllm_config.vllm_kwargs",
    "world.replicas",
    "world.actor_fraction",
    "world.preprocessor_fraction",
    "world.finetune_fraction",
    "finetune.seq_length",
    "finetune.seq_packing",
    "finetune.train_batch_size",
    "finetune.gradient_accumulation_passes",
    "finetune.learning_rate",
    "finetune.max_train_steps",
    "finetune.save_checkpoint_steps",
    "finetune.weight_update_interval",
    "finetune.seq_parallel",
    "finetune.rl.policy_loss",
    "finetune.rl.kl_coef",
    "finetune.rl.entropy_bonus",
    "finetune.rl.epsilon_low",
    "finetune.rl.epsilon_high",
    "deepspeed_config",
    "force_restart",
    "sandbox_endpoint",
    "wandb.wandb_project_name",
    "wandb.wandb_entity_name",
]


def test_config_keys_known_to_users_are_there() -> None:
    base = compose("base", REQUIRED)
    assert set(KNOWN_TO_USERS) <= set(config_keys())
    assert [key for key in KNOWN_TO_USERS if OmegaConf.select(base, key, default="absent") == "absent"] == []


@pytest.mark.parametrize("streams", ["files", "redis"])
def test_config_streams_groups_select_their_backend(streams: str) -> None:
    assert parse(compose("base", [*REQUIRED, f"streams={streams}"])).streams.backend == streams


def test_config_yaml_and_types_name_the_same_keys() -> None:
    composed = OmegaConf.to_container(compose("base", REQUIRED), resolve=True)
    assert isinstance(composed, dict)
    composed.pop("hydra", None)
    assert {key for key in keys_of(composed) if key in config_keys()} == set(config_keys()) - {
        "tiny_model.recipe",
        "tiny_model.seed",
        "tiny_model.params",
    }


def keys_of(section: dict, prefix: str = "") -> list[str]:
    keys = []
    for name, value in section.items():
        keys.append(f"{prefix}{name}")
        if isinstance(value, dict):
            keys.extend(keys_of(value, f"{prefix}{name}."))
    return keys


def test_config_every_key_is_read_by_some_module() -> None:
    """A setting without effect is forbidden: something other than a rule must read every leaf by its name."""
    say_only = ("config/sections/", "config/rules/", "config/docs.py")
    paths = [path for path in (ROOT / "pipelinerl").rglob("*.py") if not any(part in str(path) for part in say_only)]
    sources = "\n".join(path.read_text() for path in paths)
    names = {key.last for key in declared(Config)}
    unread = sorted(name for name in names if not re.search(rf"[.\"']{name}\b", sources))
    free_for_the_domain, read_by_batch_size = {"domain", "environment"}, {"gradient_accumulation_passes"}
    assert set(unread) <= free_for_the_domain | read_by_batch_size, unread


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_config_every_experiment_passes_the_types(path: Path) -> None:
    missing = OmegaConf.missing_keys(compose(path.stem))
    defaults = [override for override in REQUIRED if override.split("=")[0] in missing]
    assert isinstance(parse(compose(path.stem, defaults)), Config)


def test_config_no_two_experiments_have_one_name() -> None:
    names = [path.stem for path in EXPERIMENTS]
    assert {"quickstart", "words"} <= set(names)
    assert len(names) == len(set(names))


def test_config_every_file_is_part_of_a_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["pipelinerl"]
    assert (ROOT / "pipelinerl" / "conf").resolve() == CONF_DIR
    shipped = {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}
    assert shipped == {str(path.relative_to(ROOT)) for path in CONF_DIR.rglob("*") if path.is_file()}
