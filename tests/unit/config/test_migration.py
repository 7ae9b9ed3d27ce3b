"""Experiments of PipelineRL become experiments of this project, and nothing is lost without a word."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.load import compose, validate
from pipelinerl.config.migrate.__main__ import main
from pipelinerl.config.migrate.migration import Migration, migrate
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.learning_rate import learning_rate

OWN = {"actor": {"rollout_policy": "os.getcwd"}, "dataset_loader": "os.getcwd"}


def config_of(new: Migration, folder: Path) -> Config:
    (folder / "new.yaml").write_text(yaml.safe_dump(new.document(), sort_keys=False))
    return validate(compose("new", ["output_dir=x"], config_dir=folder))


def experiment(*defaults: Any, **sections: Any) -> dict[str, Any]:
    return {"defaults": ["base", *defaults, "_self_"], **OWN, **sections}


def test_environments_of_the_users_own_stay_and_pipelinerls_are_verifiers(tmp_path: Path) -> None:
    judge = {"key": "math", "mode": "remote", "_target_": "pipelinerl.domains.math.MathEnvironment"}
    own = {"key": "dice", "_target_": "my_module.Dice", "replicas_per_actor": 2}
    config = config_of(migrate(experiment(environments=[judge], world={"env_replicas": 3})), tmp_path)
    assert (config.environments, config.world.verifier_replicas) == ([], 3)
    config = config_of(migrate(experiment(environment=judge, environment_key="math")), tmp_path)
    assert (config.environment, config.environment_key) == (None, None)
    both = experiment(environments=[judge, own], environment_key="dice", world={"env_replicas": 3})
    config = config_of(migrate(both), tmp_path)
    assert config.environments == [own]
    assert (config.environment_key, config.world.env_replicas, config.world.verifier_replicas) == ("dice", 3, 1)


def test_plain_experiment_keeps_pipelinerls_values(tmp_path: Path) -> None:
    config = config_of(migrate(experiment()), tmp_path)
    assert (config.batch_size, config.attempts) == (1024, 8)
    assert config.finetune.rl.ratio_clamp == 1.02
    assert config.eval_every_n_versions == 77  # 78,000 samples of 1,024
    assert config.test_llm.parameters["top_p"] == 0.95


@pytest.mark.parametrize(
    ("preset", "loss", "advantage", "attempts"),
    [("ppo", "ppo", "value", 1), ("actor_critic", "reinforce", "value", 1), ("grpo", "ppo", "loo", 8)],
)
def test_files_of_finetune_keep_what_they_mean(
    preset: str, loss: str, advantage: str, attempts: int, tmp_path: Path
) -> None:
    config = config_of(migrate(experiment({"override finetune": preset})), tmp_path)
    rl = config.finetune.rl
    assert (rl.policy_loss, rl.advantage, config.attempts) == (loss, advantage, attempts)
    assert (rl.epsilon_low, rl.epsilon_high) == ((0.02, 0.02) if loss == "ppo" else (0.2, 0.2))
    assert rl.value_loss_coef == (0.1 if advantage == "value" else 0)


def test_keys_move_with_their_units_and_values(tmp_path: Path) -> None:
    old = experiment(
        finetune={
            "attempts": 16,
            "max_lag": 3000,
            "weight_update_interval": 2048,
            "weight_decay": 0.1,
            "rl": {"epsilon_high": 0.5, "divide_advantage_by_std": True},
        },
        eval_every_n_versions=20000,
        wandb={"use_wandb": False},
        rewards={"wrong_answer_finished": -0.5, "wrong_answer_not_finished": -1},
    )
    config = config_of(migrate(old), tmp_path)
    assert (config.attempts, config.wandb.mode) == (16, "disabled")
    assert (config.max_lag_steps, config.finetune.weight_update_interval, config.eval_every_n_versions) == (3, 2, 20)
    assert (config.finetune.optimizer.weight_decay, config.finetune.rl.ratio_clamp) == (0.1, 1.5)
    assert config.finetune.rl.advantage == "group_std"
    assert config.rewards["wrong"] == -0.5
    assert config.rewards["unfinished"] == {"wrong": -1}


def test_evaluation_that_never_happened_is_off(tmp_path: Path) -> None:
    old = experiment(finetune={"max_train_steps": 10}, eval_every_n_versions=20000)
    new = migrate(old)
    assert config_of(new, tmp_path).eval_every_n_versions == 0
    assert any(line.startswith("eval_every_n_versions: 20000 → 0: ") for line in new.changed)


def test_lengths_that_do_not_fit_are_made_to(tmp_path: Path) -> None:
    lengths = {"finetune": {"seq_length": 4000}, "llm": {"parameters": {"max_tokens": 500}}}
    config = config_of(migrate(experiment(**lengths, test_llm={"parameters": {"max_tokens": 500}})), tmp_path)
    assert config.vllm_config.vllm_kwargs["max-model-len"] == 4000


def test_rewards_files_have_the_same_table(tmp_path: Path) -> None:
    config = config_of(migrate(experiment({"override rewards": "success_and_format"})), tmp_path)
    assert config.rewards == {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "unparsable": 0.0, "unfinished": 0.0}


def test_every_key_is_carried_or_told() -> None:
    keys = {
        "my_own": {"key": 1},
        "me": {"job_idx": None},
        "preprocess": {"n_workers": 8, "ring_buffer_size": 128},
        "debug": {"mode": "open_loop", "use_existing_llms": True},
        "finetune": {"model_class": "seq2seq-language-modeling"},
    }
    new = migrate(experiment({"/domain_mix": "base"}, **keys))
    told = "\n".join([*new.needless, *new.missing, *new.changed])
    for name in (
        "my_own.key",
        "me.job_idx",
        "preprocess.n_workers",
        "debug.mode",
        "debug.use_existing_llms",
        "domain_mix",
    ):
        assert name in told
    assert any(line.startswith("finetune.model_class: seq2seq") for line in new.missing)
    assert new.values["actor.rollout_policy"] == "os.getcwd"


def test_keys_of_the_domains_own_stay_where_they_are(tmp_path: Path) -> None:
    old = experiment(sandbox_timeout=10.0, my_own={"key": 1}) | {"actor": OWN["actor"] | {"agent_max_loops": 3}}
    new = migrate(old)
    assert sorted(new.values["extra_keys"]) == ["actor.agent_max_loops", "my_own.key", "sandbox_timeout"]
    config_of(new, tmp_path)
    assert compose("new", ["output_dir=x"], config_dir=tmp_path).actor.agent_max_loops == 3


def test_references_follow_their_keys() -> None:
    new = migrate(experiment(domain={"n": "${finetune.attempts}", "m": "${debug.use_existing_llms}"}))
    assert "domain" not in new.values
    assert any("refers to `debug.use_existing_llms`" in line for line in new.missing)
    assert migrate(experiment(domain={"n": "${finetune.attempts}"})).values["domain"] == {"n": "${attempts}"}


def test_loaders_of_pipelinerls_domains_have_their_names_and_not_their_parameters() -> None:
    old = experiment() | {
        "dataset_loader": "pipelinerl.domains.math.load_datasets",
        "dataset_loader_params": {"max_examples": 3},
    }
    new = migrate(old)
    assert new.values["dataset_loader"] == "pipelinerl.domains.math.load_problems"
    assert "dataset_loader_params" not in new.values
    assert any(line.startswith("dataset_loader_params") for line in new.missing)


def test_derived_experiment_is_migrated_by_itself() -> None:
    new = migrate({"defaults": ["my_base"], "eval_every_n_versions": 500})
    assert new.document() == {"defaults": ["my_base", "_self_"], "eval_every_n_versions": "500 samples"}


def test_command_prints_a_file_whose_head_tells_everything(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "old.yaml").write_text(
        "defaults: [base]\nactor: {system_prompt: 'a\n\n  b'}\nwandb: {use_wandb: false}\n"
    )
    assert main([str(tmp_path / "old.yaml")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("# From PipelineRL's old.yaml.")
    assert "# - wandb.use_wandb: false → wandb.mode: disabled" in printed
    assert yaml.safe_load(printed)["actor"] == {"system_prompt": "a\nb", "rewards": "texts"}


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2\n"])
def test_command_refuses_what_is_no_experiment(content: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(content)
    with pytest.raises(ConfigError):
        main([str(tmp_path / "old.yaml")])


NOT_HERE = {
    "coding": ("generate_coding_rollout", "dataset.load_problems"),
    "ifeval": ("generate_ifeval_rollout", "dataset.load_problems"),
    "fn_calling": ("generate_fn_calling_rollout", "dataset.load_problems"),
    "logic": ("generate_logic_rollout", "dataset.load_problems"),
    "chartqa": ("generate_chartqa_rollout", "load_problems"),
    "miniwob": ("rollouts.generate_miniwob_rollout", "load_tasks.load_tasks"),
}


@pytest.mark.parametrize("domain", NOT_HERE)
def test_domain_whose_task_is_not_here_is_no_other_task(domain: str) -> None:
    rollout, loader = (f"pipelinerl.domains.{domain}.{name}" for name in NOT_HERE[domain])
    judge = {"key": domain, "mode": "remote", "_target_": f"pipelinerl.domains.{domain}.Environment"}
    parameters = {"max_tests_per_problem": 5, "seed": 42}
    new = migrate(
        experiment(environments=[judge], environment_key=domain)
        | {"actor": {"rollout_policy": rollout}, "dataset_loader": loader, "dataset_loader_params": parameters}
    )
    assert (new.values["actor.rollout_policy"], new.values["dataset_loader"]) == (rollout, loader)
    assert new.values["dataset_loader_params"] == parameters, "the copy takes them as they are"
    assert (new.values["environments"], new.values["environment_key"]) == ([judge], domain)
    (said,) = [line for line in new.missing if "is not here" in line]
    assert f"copy PipelineRL's folder pipelinerl/domains/{domain}" in said
    assert "`actor.rollout_policy`, `dataset_loader`" in said or "`environments`" in said
    for name in (rollout, loader):
        with pytest.raises(ConfigError):
            resolve_function(name)


def test_domains_of_a_dispatcher_are_mapped_or_named() -> None:
    played = {
        "math": "pipelinerl.domains.math.generate_math_rollout",
        "guessing": "pipelinerl.domains.guessing.generate_guessing_rollout",
        "ifeval": "pipelinerl.domains.ifeval.generate_ifeval_rollout",
    }
    new = migrate(experiment() | {"actor": {"rollout_policy": "os.getcwd", "domain_rollouts": played}})
    mapped = new.values["actor.domain_rollouts"]
    assert mapped["guessing"] == "pipelinerl.domains.pipelinerl_games.guessing.generate_rollout"
    assert (mapped["math"], mapped["ifeval"]) == (played["math"], played["ifeval"])
    assert [line.split("`")[1] for line in new.missing if "is not here" in line] == ["ifeval"]


@pytest.mark.parametrize("domain", ["guessing", "counting"])
def test_games_are_pipelinerls_and_not_the_projects(domain: str) -> None:
    there = f"pipelinerl.domains.{domain}"
    names = {
        "actor": {"rollout_policy": f"{there}.generate_{domain}_rollout"},
        "dataset_loader": f"{there}.load_problems",
    }
    new = migrate(experiment() | names)
    here = f"pipelinerl.domains.pipelinerl_games.{domain}"
    assert new.values["actor.rollout_policy"] == f"{here}.generate_rollout"
    assert new.values["dataset_loader"] == f"{here}.load_problems"
    assert callable(resolve_function(f"{here}.generate_rollout"))


def test_texts_of_a_rollout_are_compared_and_counted_as_there(tmp_path: Path) -> None:
    new = migrate(experiment())
    config = config_of(new, tmp_path)
    assert (config.actor.rewards, config.finetune.rl.aggregation) == ("texts", "sum_over_texts")
    assert config.finetune.batch_unit == "texts"
    assert any(line.startswith("finetune.batch_unit: texts") for line in new.changed)
    one = migrate(experiment() | {"actor": {"rollout_policy": "pipelinerl.domains.math.generate_math_rollout"}})
    assert not {"actor.rewards", "finetune.batch_unit"} & one.values.keys()
    grouped = migrate(experiment(finetune={"rl": {"group_normalization": True}}))
    assert grouped.values["finetune.rl.aggregation"] == "prompt_mean"


@pytest.mark.parametrize(
    ("interval", "max_lag", "steps"),
    [(1, 0, 0), (1, 2500, 2), (1024, 0, 0), (4096, 0, 3), (4000, 1024, 4)],
)
def test_lag_bound_holds_the_samples_of_a_weight_update(
    interval: int, max_lag: int, steps: int, tmp_path: Path
) -> None:
    """At version v the actor there starts up to v + ⌈U / B⌉ B + max_lag samples: the last is trained so much later."""
    config = config_of(migrate(experiment(max_lag=max_lag, finetune={"weight_update_interval": interval})), tmp_path)
    assert config.max_lag_steps == steps


def test_interrupted_run_keeps_its_schedules(tmp_path: Path) -> None:
    old = experiment(finetune={"interrupt_train_steps": 90, "max_train_steps": 1000, "num_warmup_steps": 0})
    config = config_of(migrate(old), tmp_path)
    assert (config.finetune.max_train_steps, config.finetune.schedule_steps) == (90, 1000)
    assert learning_rate(config.finetune, 500) == pytest.approx(0.5e-6)
    unset = config_of(migrate(experiment(finetune={"interrupt_train_steps": 90, "num_warmup_steps": 0})), tmp_path)
    assert unset.finetune.schedule_steps == 100_000
    whole = config_of(migrate(experiment(finetune={"interrupt_train_steps": -1})), tmp_path)
    assert (whole.finetune.max_train_steps, whole.finetune.schedule_steps) == (100_000, None)


def test_mix_of_domains_becomes_weights(tmp_path: Path) -> None:
    old = experiment() | {
        "actor": {
            "rollout_policy": "pipelinerl.domains.dispatcher.generate_multidomain_rollout",
            "domain_rollouts": {"math": "os.getcwd", "mine": "os.getcwd", "off": "os.getcwd"},
            "domain_mix": {"math": 0.7, "mine": 0.3, "off": 0},
        },
        "dataset_loader": "pipelinerl.domains.multidomain.loader.load_datasets",
        "dataset_loader_params": {"seed": 1, "per_domain_params": {"mine": {"level": 2}}},
        "train_dataset_names": ["math::math_500", "mine::a", "mine::b"],
        "test_dataset_names": ["math::aime_2024"],
    }
    math, mine = config_of(migrate(old), tmp_path).domains or ()
    assert (math.name, math.weight, mine.name, mine.weight) == ("math", 0.7, "mine", 0.3)
    assert (math.train_dataset_names, math.test_dataset_names) == (["math::math_500"], ["math::aime_2024"])
    assert (mine.train_dataset_names, mine.test_dataset_names) == (["mine::a", "mine::b"], [])
    assert (math.dataset_loader_params, mine.dataset_loader_params) == (
        {"seed": 1},
        {"seed": 1, "per_domain_params": {"mine": {"level": 2}}},
    )
    unnamed = migrate(old | {"train_dataset_names": ["math_500"]})
    assert any(line.startswith("actor.domain_mix: ") for line in unnamed.missing)


def test_named_accelerate_config_is_told() -> None:
    assert any(
        line.startswith("accelerate_config: ") for line in migrate(experiment(accelerate_config="fsdp_mp")).missing
    )
    assert not any("accelerate_config" in line for line in migrate(experiment(accelerate_config=None)).missing)
