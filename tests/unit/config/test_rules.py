"""Every rule refuses exactly what it names, and the base configuration passes all of them."""

from pathlib import Path

import pytest

from pipelinerl.config import rules
from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


@pytest.fixture(scope="module")
def base() -> Config:
    return parse(compose("base", REQUIRED))


def changed(base: Config, **updates: object) -> Config:
    """`finetune__rl__kl_coef=0.1` → a copy with `finetune.rl.kl_coef` replaced."""
    document = base.model_dump()
    for path, value in updates.items():
        *sections, name = path.split("__")
        target = document
        for section in sections:
            target = target[section]
        target[name] = value
    return Config.model_validate(document)


def test_check_base_configuration_has_no_hint(base: Config) -> None:
    rules.check_rules(base)
    assert rules.hints(base) == []


def domain(name: str) -> dict[str, object]:
    return {
        "name": name,
        "weight": 1.0,
        "rollout_policy": "a.rollout",
        "dataset_loader": "a.load",
        "dataset_loader_params": {},
        "train_dataset_names": ["train"],
        "test_dataset_names": [],
    }


REFUSED = {
    "deltas_in_store_are_said": {"weights__backend": "store", "weights__delta": "auto"},
    "store_is_reached_by_all": {"weights__backend": "store", "streams__backend": "redis"},
    "sequence_fits_trainer": {"finetune__seq_length": 9999},
    "micro_batch_fits_record": {"finetune__seq_length": 70_000, "streams__max_record_mb": 1},
    "completion_fits_server": {"llm__parameters": {"max_tokens": 10000, "temperature": 1.0}},
    "max_tokens_given": {"test_llm__parameters": {"temperature": 1.0}},
    "sampling_is_undistorted": {"llm__parameters": {"max_tokens": 10, "temperature": 1.0, "top_p": 0.9}},
    "server_defaults_are_neutral": {"vllm_config__vllm_kwargs": {"max-model-len": 10000}},
    "temperature_is_positive": {"llm__parameters": {"max_tokens": 8192, "temperature": 0.0}},
    "kl_has_reference": {"finetune__rl__final_kl_coef": 0.01},
    "value_advantage_has_value_loss": {"finetune__rl__advantage": "value"},
    "server_variables_are_of_their_types": {"vllm_config__env": {"OMP_NUM_THREADS": "abc"}},
    "renderer_is_alone": {"llm__renderer": "qwen3", "llm__chat_template": "own.jinja"},
    "domains_are_told_apart": {"domains": [domain("a/b")]},
    "judges_can_judge": {"judges": [{"name": "helpful", "model_path": "some/model"}]},
    "reward_function_is_played": {"reward_function": "my_module.score"},
    "wandb_takes_its_names": {"wandb__wandb_project_name": "rl/maths"},
    "loss_is_a_def": {"finetune__rl__policy_loss": "tests.losses.bound"},
    "loss_has_its_figures": {"finetune__rl__policy_loss": "tests.losses.named"},
    "teachers_teach": {"teachers": [{"model_path": "t", "domains": None}], "world__preprocessor_fraction": 1},
    "averages_follow_the_policy": {
        "teachers": [{"ema": 0.99, "model_path": "other"}],
        "finetune__rl__teacher_coef": 1.0,
        "world__preprocessor_fraction": 1,
    },
    "reference_model_is_used": {"reference_model_path": "other"},
    "sft_has_conversations": {"stage": "sft"},
    "group_has_baseline": {"attempts": 1},
    "named_rewards_are_compared": {"finetune__rl__reward_weights": {"style": 1.0}, "actor__rewards": "texts"},
    "lag_allows_updates": {"max_lag_steps": 0, "finetune__weight_update_interval": 2},
    "engine_runs_with_settings": {"deepspeed_config": "nope"},
    "sequence_parallel_needs_packing": {"finetune__seq_parallel": 2, "finetune__seq_packing": False},
    "compiled_layers_are_whole": {
        "finetune__compile": True,
        "finetune__router_replay": True,
        "finetune__engine": "ddp",
    },
    "overlong_buffer_fits": {"preprocess__overlong_buffer_tokens": 8192},
    "external_redis_has_address": {"streams__external": True},
    "tls_files_are_complete": {"world__tls_cert": "cert.pem"},
    "profiled_steps_are_in_order": {"finetune__profile_steps": (3, 2)},
    "betas_are_rates": {"finetune__optimizer__betas": (0.9, 1.0)},
    "objective_is_known": {"finetune__rl__policy_loss": "reinforced"},
    "loss_keys_are_used": {"finetune__rl__policy_loss": "ppo", "finetune__rl__ratio_clamp": 2.0},
    "dual_clip_is_beyond_the_clip": {"finetune__rl__policy_loss": "ppo", "finetune__rl__dual_clip": 1.1},
    "ratio_clamp_is_not_replaced": {"finetune__rl__token_mis": 2.0, "finetune__rl__ratio_clamp": 3.0},
    "lower_mask_has_an_upper_one": {"finetune__rl__token_mis_low": 0.5},
    "ratio_is_counted_once": {"finetune__rl__policy_loss": "gspo", "finetune__rl__sequence_tis": 2.0},
    "block_of_steps_can_be_there": {"finetune__rl__policy_loss": "ppo", "finetune__rl__proximal_every": 10},
    "proximal_policy_is_used": {"finetune__rl__proximal_every": 1},
    "kl_clamp_is_used": {"finetune__rl__kl_clamp": 2.0},
    "filter_knows_advantages": {
        "preprocess__filter_zero_advantage_groups": True,
        "finetune__rl__advantage": "value",
        "finetune__rl__value_loss_coef": 0.5,
    },
    "phases_are_conventional": {"steps_per_phase": 2},
    "intervals_fit_the_run": {"eval_every_n_versions": 20_000},
    "streams_come_with_their_mode": {"debug__mode": "finetune"},
    "recorded_streams_become_files": {
        "debug__mode": "preprocessor",
        "debug__streams_from": "results/recorded",
        "streams__backend": "redis",
    },
    "existing_servers_come_with_rollouts": {"debug__existing_llms": ["http://127.0.0.1:8080"]},
    "standalone_on_one_node": {"debug__mode": "actor", "launcher__engine": "ray"},
    "standalone_from_the_beginning": {"debug__mode": "servers", "resume": "checkpoint"},
    "evaluation_has_problems": {"debug__mode": "evaluation", "test_dataset_names": []},
    "subset_is_not_empty": {"train_subset": {"begin": 8, "end": 8}},
    "sampler_takes_its_arguments": {"actor__sampler_kwargs": {"rest": 0.1}},
    "ray_shares_no_device": {"launcher__engine": "ray", "world__share_devices": True},
}


def test_refusals_cover_every_rule() -> None:
    assert {rule.__name__ for rule in rules.RULES} == set(REFUSED)


@pytest.mark.parametrize("rule", REFUSED)
def test_rule_refuses_its_case_and_no_other_rule_does(base: Config, rule: str) -> None:
    broken = [r.__name__ for r in rules.RULES if r(changed(base, **REFUSED[rule]))]
    assert broken == [rule]


@pytest.mark.parametrize("rule", REFUSED)
def test_rule_message_names_a_key_it_is_about(base: Config, rule: str) -> None:
    with pytest.raises(ConfigError) as refused:
        rules.check_rules(changed(base, **REFUSED[rule]))
    assert any(path.replace("__", ".") in str(refused.value) for path in REFUSED[rule]) or "`" in str(refused.value)  # type: ignore[attr-defined]


def test_sequence_fits_trainer_message_has_both_numbers(base: Config) -> None:
    text = rules.training.sequence_fits_trainer(changed(base, finetune__seq_length=4096))
    assert text is not None
    assert text.startswith("`finetune.seq_length` is 4096 but `vllm_config.vllm_kwargs.max_model_len` is 10000")


def test_interval_longer_than_the_run_is_refused_unless_it_is_the_default(base: Config) -> None:
    short = {"finetune__max_train_steps": 3}
    assert rules.experiment.intervals_fit_the_run(changed(base, **short)) is None
    text = rules.experiment.intervals_fit_the_run(changed(base, eval_every_n_versions=101, **short))
    assert text is not None
    assert "`finetune.max_train_steps` is 3" in text
    assert "write '101 samples'" in text
    assert (
        rules.experiment.intervals_fit_the_run(changed(base, finetune__weight_update_interval=4, **short)) is not None
    )


@pytest.mark.parametrize(
    ("loss", "key", "value"),
    [
        ("reinforce", "epsilon_low", 0.1),
        ("reinforce", "epsilon_high", 0.28),
        ("reinforce", "dual_clip", 3.0),
        ("ppo", "ratio_clamp", 2.0),
        ("gspo", "ratio_clamp", 2.0),
        ("decoupled_ppo", "ratio_clamp", 2.0),
    ],
)
def test_bound_that_the_policy_loss_does_not_have_is_refused_by_name(
    base: Config, loss: str, key: str, value: float
) -> None:
    changes = {"finetune__rl__policy_loss": loss, f"finetune__rl__{key}": value}
    with pytest.raises(ConfigError, match=rf"`finetune\.rl\.{key}`={value} has no effect.*is {loss}"):
        rules.check_rules(changed(base, **changes))


def test_ratio_truncated_at_both_levels_is_refused(base: Config) -> None:
    both = changed(base, finetune__rl__token_tis=2.0, finetune__rl__sequence_tis=3.0)
    with pytest.raises(ConfigError, match=r"token_tis`=2.0 and .*sequence_tis`=3.0.*remove one"):
        rules.check_rules(both)


def test_truncation_is_accepted_where_the_weight_is_outside_the_clip(base: Config) -> None:
    for changes in (
        {"finetune__rl__policy_loss": "decoupled_ppo"},
        {"finetune__rl__policy_loss": "gspo", "finetune__rl__proximal_every": 1},
        {},
    ):
        rules.check_rules(changed(base, finetune__rl__token_tis=2.0, **changes))


def test_kwargs_without_a_function_of_ones_own_are_refused(base: Config) -> None:
    with pytest.raises(ConfigError, match=says("`finetune.rl.policy_loss_kwargs`", "`finetune.rl.policy_loss`")):
        rules.check_rules(changed(base, finetune__rl__policy_loss_kwargs={"cap": 2}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", 20),
        ("min_tokens", 5),
        ("thinking_token_budget", 0),
        ("structured_outputs", {"regex": "a+"}),
        ("logit_bias", {"7": 3.0}),
        ("allowed_token_ids", [1, 2]),
    ],
)
def test_parameter_that_masks_tokens_is_refused_for_training_only(base: Config, name: str, value: object) -> None:
    parameters = {**base.llm.parameters, name: value}
    assert f"`llm.parameters.{name}`" in (
        rules.rollouts.sampling_is_undistorted(changed(base, llm__parameters=parameters)) or ""
    )
    assert rules.rollouts.sampling_is_undistorted(changed(base, test_llm__parameters=parameters)) is None


@pytest.mark.parametrize(
    "parameters", [{"top_p": 1}, {"top_k": -1}, {"min_tokens": 0}, {"logit_bias": {}}, {"seed": 3}]
)
def test_neutral_sampling_parameter_is_accepted(base: Config, parameters: dict) -> None:
    assert (
        rules.rollouts.sampling_is_undistorted(changed(base, llm__parameters=base.llm.parameters | parameters)) is None
    )


def test_veto_that_would_drop_on_policy_sequences_is_refused(base: Config) -> None:
    with pytest.raises(ValueError, match="less than 1"):
        changed(base, finetune__rl__veto=1.0)


TEACHER = {"model_path": "t", "domains": None}
TAUGHT = {"teachers": [TEACHER], "finetune__rl__teacher_coef": 1.0, "world__preprocessor_fraction": 1}
DOMAINS = [
    {
        "name": name,
        "weight": 1.0,
        "rollout_policy": "a.b",
        "dataset_loader": "a.b",
        "dataset_loader_params": {},
        "train_dataset_names": ["x"],
        "test_dataset_names": [],
    }
    for name in ("maths", "code")
]
BY_DOMAIN = [{"model_path": "m", "domains": ["maths"]}, {"model_path": "c", "domains": ["code"]}]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attempts": 1},
        {"domains": DOMAINS},
        {"domains": DOMAINS, "teachers": BY_DOMAIN},
        {"teachers": [{"ema": 0.9, "hint": True}]},
    ],
)
def test_teachers_that_cover_every_domain_are_accepted(base: Config, changes: dict[str, object]) -> None:
    rules.check_rules(changed(base, **(TAUGHT | changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world__preprocessor_fraction": 0}, ("teachers", "world.preprocessor_fraction", 0)),
        ({"teachers": []}, ("finetune.rl.teacher_coef", "teachers", "empty")),
        (
            {"teachers": [], "finetune__rl__teacher_coef": 0.0, "finetune__rl__teacher_top_k": 8},
            ("teacher_top_k", "empty"),
        ),
        ({"teachers": [TEACHER, TEACHER]}, ("teachers", "one domain")),
        ({"domains": DOMAINS, "teachers": BY_DOMAIN[:1]}, ("code", 0, "teachers")),
        ({"domains": DOMAINS, "teachers": [TEACHER, *BY_DOMAIN]}, ("maths", 2, "teachers")),
        ({"domains": DOMAINS, "teachers": [TEACHER | {"domains": ["maths", "code", "law"]}]}, ("law", "teachers")),
        ({"preprocess__filter_zero_advantage_groups": True}, ("preprocess.filter_zero_advantage_groups", "teacher")),
        ({"teachers": [TEACHER | {"ema": 0.9}]}, ("teachers.ema", "teachers.model_path")),
        (
            {"teachers": [{"ema": 0.9}], "finetune__lora__enabled": True},
            ("teachers.ema", "finetune.lora.send=merged"),
        ),
        ({"teachers": [{"ema": 0.9}], "weights__backend": "store"}, ("teachers.ema", "weights.backend", "store")),
        ({"teachers": [{"ema": 0.9}], "debug__mode": "preprocessor"}, ("teachers.ema", "debug.mode", "preprocessor")),
    ],
)
def test_teachers_that_cannot_teach_are_refused(
    base: Config, changes: dict[str, object], words: tuple[str | int, ...]
) -> None:
    with pytest.raises(ConfigError, match=says(*words)):
        rules.check_rules(changed(base, **(TAUGHT | changes)))


@pytest.mark.parametrize(
    ("named", "changes", "words"),
    [
        ("values", {}, ("values", "finetune.rl.advantage", "loo")),
        ("teacher_logprobs", {}, ("teacher_logprobs", "teachers")),
        ("ref_logprobs", {}, ("ref_logprobs", "world.preprocessor_fraction", 0)),
        ("ref_logprobs", {"world__preprocessor_fraction": 1}, ()),
        ("teacher_logprobs", TAUGHT | {"finetune__rl__teacher_coef": 0.0}, ()),
        ("values", {"finetune__rl__advantage": "value"}, ()),
    ],
)
def test_loss_that_names_what_nothing_computes_is_refused(
    base: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: str,
    changes: dict[str, object],
    words: tuple[str | int, ...],
) -> None:
    (tmp_path / f"naming_{named}.py").write_text(f"def loss(logprobs_K, tokens, {named}): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = changed(base, finetune__rl__policy_loss=f"naming_{named}.loss", **changes)
    if words:
        with pytest.raises(ConfigError, match=says(*words)):
            rules.check_rules(config)
    else:
        rules.check_rules(config)


def test_names_of_domains_are_kept_as_they_are(base: Config) -> None:
    names = ["Math", "math", "math-1", "math 1", "math.1", "test", "train", "sft", "数学", "a:b@c=d,{e}%", "x" * 64]
    rules.check_rules(changed(base, domains=[domain(name) for name in names]))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["math", "code", "math"], ("math", 2)),
        (["math/level_1"], ("math/level_1", "slash")),
        ([""], ("''",)),
        (["math "], ("'math '", "spaces")),
        (["math\n"], ("control character",)),
        (["x" * 65], (65, 64)),
        (["数" * 22], (66, 64)),
        *((["math", group], (group, f"{group}/")) for group in rules.experiment.METRIC_GROUPS),
    ],
)
def test_domains_that_could_not_be_told_apart_are_refused(
    base: Config, names: list[str], words: tuple[str | int, ...]
) -> None:
    with pytest.raises(ConfigError, match=says("domains", *words)):
        rules.check_rules(changed(base, domains=[domain(name) for name in names]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"wandb__wandb_project_name": "50%"}, ("wandb.wandb_project_name", "50%", 128)),
        ({"wandb__wandb_project_name": "x" * 129}, ("wandb.wandb_project_name", 128)),
        ({"wandb__wandb_group": "x" * 129}, ("wandb.wandb_group", 129, 128)),
        ({"wandb__wandb_name": "x" * 109}, ("wandb.wandb_name", 109, 108)),
        ({"wandb__tags": ["short", "dataset:" + "x" * 57]}, ("wandb.tags", 65, 64)),
        ({"wandb__tags": [""]}, ("wandb.tags", 0, 64)),
        ({"wandb__wandb_project_name": "rl/maths", "wandb__mode": "disabled"}, ()),
        ({"wandb__wandb_project_name": "rl/maths", "tracker": ["tensorboard"]}, ()),
        ({"wandb__wandb_project_name": "my rl, v1.2 = é", "wandb__wandb_group": "a/b: c", "wandb__tags": ["é/ b"]}, ()),
    ],
)
def test_names_that_wandb_refuses_are_refused_where_it_is_used(
    base: Config, changes: dict[str, object], words: tuple[str | int, ...]
) -> None:
    if words:
        with pytest.raises(ConfigError, match=says(*words)):
            rules.check_rules(changed(base, **changes))
    else:
        rules.check_rules(changed(base, **changes))


def test_domain_has_another_name_than_the_conversations_beside_it(base: Config) -> None:
    beside = {"sft__datasets": ["rows.jsonl"], "sft__per_step": 1}
    with pytest.raises(ConfigError, match=says("domains", "sft", "sft.datasets")):
        rules.check_rules(changed(base, domains=[domain("sft")], **beside))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sft__datasets": ["x.jsonl"]}, ("sft.datasets", "sft.per_step", 0)),
        ({"sft__per_step": 4}, ("sft.per_step", 4, "sft.datasets")),
        ({"stage": "sft", "sft__datasets": ["x.jsonl"], "sft__per_step": 4}, ("sft.per_step", 4, "stage")),
        ({"sft__test_datasets": ["x.jsonl"]}, ("sft.test_datasets", "x.jsonl", "stage=sft")),
        ({"sft__epochs": 2.0}, ("sft.epochs", "stage=sft")),
        (
            {
                "sft__datasets": ["x"],
                "sft__per_step": 4,
                "finetune__rl__advantage": "value",
                "finetune__rl__value_loss_coef": 0.5,
            },
            ("finetune.rl.advantage", "value"),
        ),
    ],
)
def test_conversations_without_a_stage_or_data_are_refused(
    base: Config, changes: dict[str, object], words: tuple[str | int, ...]
) -> None:
    with pytest.raises(ConfigError, match=says(*words)):
        rules.check_rules(changed(base, **changes))


def test_kl_with_a_reference_server_is_accepted(base: Config) -> None:
    assert (
        rules.objective.kl_has_reference(changed(base, finetune__rl__kl_coef=0.1, world__preprocessor_fraction=1))
        is None
    )


@pytest.mark.parametrize("phase", [1, 2, 5])
def test_lag_bound_of_a_phase_is_its_length_minus_one(base: Config, phase: int) -> None:
    enough = changed(base, schedule="conventional", steps_per_phase=phase, max_lag_steps=phase - 1)
    assert rules.experiment.lag_allows_updates(enough) is None
    if phase > 1:
        short = changed(base, schedule="conventional", steps_per_phase=phase, max_lag_steps=phase - 2)
        assert rules.experiment.lag_allows_updates(short) is not None


@pytest.mark.parametrize(
    ("lag_drop", "max_lag_steps", "schedule", "expected"),
    [
        ("never", 8, "pipeline", None),
        ("never", None, "pipeline", None),
        ("never", 0, "pipeline", 0),  # synchronous: a mean of 0 is 0 for each
        ("never", 8, "conventional", 8),
        ("rollout", 8, "pipeline", 8),
        ("token", 8, "pipeline", 8),
        ("token", None, "pipeline", None),
    ],
)
def test_single_tokens_have_a_bound_where_older_ones_are_dropped(
    base: Config, lag_drop: str, max_lag_steps: int | None, schedule: str, expected: int | None
) -> None:
    found = changed(base, preprocess__lag_drop=lag_drop, max_lag_steps=max_lag_steps, schedule=schedule)
    assert found.token_lag_bound == expected


HINTED = {
    "clip_is_idle": {"finetune__rl__policy_loss": "decoupled_ppo", "finetune__rl__epsilon_high": 0.28},
    "reference_without_kl": {"world__preprocessor_fraction": 1},
    "gpu_on_cpu": {"world__accelerator": "cpu", "world__gpu": "H100"},
    "address_without_redis": {"streams__port": 6379},
    "options_without_own_backend": {"streams__options": {"bucket": "b"}},
    "interval_without_pipeline": {"schedule": "conventional", "finetune__weight_update_interval": 2},
    "last_group_is_cut": {"max_lag_steps": 0, "attempts": 6},
    "warmup_without_schedule": {"finetune__lr_scheduler_type": "constant"},
    "engine_key_without_reader": {"finetune__shard_gradients": True},
    "store_without_backend": {"weights__store": "/shared/weights"},
    "cluster_without_ray": {"launcher__ray_address": "auto"},
}


def test_hints_cover_every_hint() -> None:
    assert {hint.__name__ for hint in rules.HINTS} == set(HINTED)


@pytest.mark.parametrize("hint", HINTED)
def test_hint_is_given_for_its_case(base: Config, hint: str) -> None:
    given = [h.__name__ for h in rules.HINTS if h(changed(base, **HINTED[hint]))]
    assert given == [hint]
