"""A whole folder of PipelineRL is migrated as its Hydra composes it: base, groups and overrides."""

import shutil
from pathlib import Path

import pytest
import yaml

from pipelinerl.config.load import compose, validate
from pipelinerl.config.migrate.__main__ import main
from pipelinerl.config.migrate.folder import migrate_folder
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError

USER = Path(__file__).resolve().parents[2] / "pipelinerl_user" / "conf"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return shutil.copytree(USER, tmp_path / "old")


def change(path: Path, **values: object) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def migrated(old: Path, name: str) -> Config:
    return validate(compose(name, ["output_dir=x"], config_dir=migrated_folder(old)))


def test_experiment_has_the_values_of_its_base_and_its_groups(old: Path) -> None:
    config = migrated(old, "counting")
    assert (config.world.actor_fraction, config.world.finetune_fraction) == (2, 2), "base_4gpu"
    assert (config.finetune.rl.policy_loss, config.finetune.rl.advantage) == ("ppo", "loo"), "finetune=grpo"
    assert (config.batch_size, config.attempts, config.finetune.num_warmup_steps) == (1024, 8, 50)
    assert (config.max_lag_steps, config.eval_every_n_versions) == (8, 77)
    assert config.finetune.attn_implementation == "auto"


def test_what_the_user_changed_in_base_and_groups_is_kept(old: Path) -> None:
    change(old / "base.yaml", seed=7, max_lag=4096)
    change(old / "finetune" / "base.yaml", learning_rate=3e-6, attempts=16)
    change(old / "rewards" / "pure_success.yaml", wrong_answer_finished=-0.5)
    config = migrated(old, "guessing")
    assert (config.seed, config.attempts, config.max_lag_steps) == (7, 16, 4)
    assert (config.finetune.learning_rate, config.rewards["wrong"]) == (3e-6, -0.5)


def test_streams_and_environments_are_those_of_the_experiment(old: Path) -> None:
    config = migrated(old, "math")
    assert (config.streams.backend, config.streams.port) == ("redis", 11000)
    assert (config.environments, config.world.verifier_replicas) == ([], 1)
    assert config.llm.chat_template_kwargs == {"enable_thinking": False}


def test_experiment_in_a_folder_below_gets_a_name_of_both(old: Path) -> None:
    (old / "group").mkdir()
    (old / "group" / "small.yaml").write_text("# @package _global_\ndefaults: [/guessing]\nattempts: 4\n")
    (old / "group" / "tiny.yaml").write_text("# @package _global_\ndefaults: [/guessing]\nattempts: 4\n")
    (old / "group" / "part.yaml").write_text("attempts: 4\n")
    (old / "broken.yaml").write_text("defaults: [nowhere]\n")
    (old / "unset.yaml").write_text("defaults: [base]\nactor: {rollout_policy: '${oc.env:NOT_SET_HERE}'}\n")
    (old / "group_small.yaml").write_text("defaults: [guessing]\nattempts: 2\n")
    new = migrate_folder(old)
    assert new.experiments["group_tiny"].values["attempts"] == 4
    assert new.experiments["group_small"].values["attempts"] == 2
    assert "group_part" not in new.experiments
    assert set(new.left_out) == {"base", "base_4gpu", "broken", "unset", "group/small"}
    assert "NOT_SET_HERE" in new.left_out["unset"]
    assert "cannot be composed" in new.left_out["broken"]


def test_references_that_hold_only_at_their_old_place_are_resolved(old: Path) -> None:
    change(old / "guessing.yaml", domain={"a": "${..seed}", "b": ["${me.job_idx}", "${attempts}"]}, me={"job_idx": 3})
    values = migrate_folder(old).experiments["guessing"].values
    assert values["domain"] == {"a": 42, "b": [3, "${attempts}"]}


def test_folder_without_a_base_is_migrated_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base]\nagent_max_loops: 3\n")
    (tmp_path / "derived.yaml").write_text("defaults: [mine]\nreward_scale: 2\n")
    (tmp_path / "again.yaml").write_text("defaults: [derived, again]\nsave_tapes: true\n")
    experiments = migrate_folder(tmp_path).experiments
    derived = experiments["derived"]
    assert derived.defaults == ["mine", "_self_"]
    assert derived.values["extra_keys"] == ["agent_max_loops", "reward_scale"], "a list hides that of the parent"
    assert experiments["again"].values["extra_keys"] == ["agent_max_loops", "reward_scale", "save_tapes"]


@pytest.mark.parametrize("arguments", [[], ["--to", "NEW"]])
def test_command_overwrites_nothing_and_says_what_it_needs(old: Path, arguments: list[str]) -> None:
    new = old.with_name("new")
    new.mkdir()
    (new / "guessing.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="is there already" if arguments else "--to FOLDER"):
        main([str(old), *[argument.replace("NEW", str(new)) for argument in arguments]])
    assert [path.name for path in new.iterdir()] == ["guessing.yaml"]


def test_folder_without_experiments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment"):
        migrate_folder(tmp_path)


@pytest.mark.parametrize("name", ["guessing", "counting"])
def test_one_file_becomes_what_its_folder_makes_of_it(old: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(old / "base.yaml", seed=7)
    expected = yaml.safe_load((migrated_folder(old) / f"{name}.yaml").read_text())
    capsys.readouterr()
    assert main([str(old / f"{name}.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == expected
    assert expected["seed"] == 7


def migrated_folder(old: Path) -> Path:
    new = old.with_name("new")
    assert main([str(old), "--to", str(new)]) == 0
    return new
