"""From Hydra's composition to the typed configuration: what is refused, and in which words."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf, open_dict

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.load import (
    _read_container,
    compose,
    config_keys,
    is_free_form,
    load_old_run,
    load_run,
    load_run_dictconfig,
    nearest_key,
    parse,
    to_container,
    validate,
)
from pipelinerl.errors import ConfigError
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


def test_validate_base_configuration_is_accepted() -> None:
    config = validate(compose("base", REQUIRED))
    assert config.batch_size == 256
    assert config.llm.temperature == config.llm.parameters["temperature"] == 1.0


def test_to_container_missing_values_are_named_together() -> None:
    with pytest.raises(ConfigError, match=r"`output_dir` must be given"):
        to_container(compose("base"))


def test_to_container_missing_value_that_others_refer_to_is_named_alone() -> None:
    cfg = compose("base", [*REQUIRED[1:], "model_path=${output_dir}/model", "finetune.num_warmup_steps=???"])
    with pytest.raises(ConfigError, match=r"^`finetune.num_warmup_steps`, `output_dir` must be given"):
        to_container(cfg)


def test_to_container_broken_interpolation_is_named() -> None:
    cfg = compose("base", [*REQUIRED, "model_path=${nowhere}"])
    with pytest.raises(ConfigError, match="`model_path` cannot be resolved"):
        to_container(cfg)


def test_parse_unknown_key_names_the_nearest() -> None:
    cfg = compose("base", REQUIRED)
    with open_dict(cfg):
        cfg.finetune.learnin_rate = 1
    with pytest.raises(ConfigError, match=says("`finetune.learnin_rate`", "`finetune.learning_rate`")):
        parse(cfg)


def test_parse_several_errors_are_all_told() -> None:
    cfg = compose("base", [*REQUIRED, "attempts=0", "finetune.learning_rate=-1"])
    with pytest.raises(ConfigError, match=says("`attempts` is 0", "`finetune.learning_rate` is -1")):
        parse(cfg)


def written_over_base(text: str) -> DictConfig:
    """The base configuration with what a YAML file says."""
    base = compose("base", REQUIRED)
    OmegaConf.set_struct(base, False)
    merged = OmegaConf.merge(base, OmegaConf.create(text))
    assert isinstance(merged, DictConfig)
    return merged


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("finetune: {learning_rate: yes}", "finetune.learning_rate"),
        ("max_lag_steps: on", "max_lag_steps"),
        ("attempts: no", "attempts"),
        ("finetune: {optimizer: {betas: [true, 0.9]}}", "finetune.optimizer.betas"),
        ("finetune: {rl: {reward_weights: {style: off}}}", "finetune.rl.reward_weights"),
        ("finetune: {gradient_clipping_threshold: yes}", "finetune.gradient_clipping_threshold"),
        ("actor: {llm_max_rollouts: true}", "actor.llm_max_rollouts"),
        ("world: {gpus_per_node: [true, 8]}", "world.gpus_per_node"),
        ("train_subset: {begin: no, end: 5}", "train_subset.begin"),
    ],
)
def test_parse_boolean_as_a_number_is_refused(written: str, key: str) -> None:
    with pytest.raises(ConfigError, match=says(f"`{key}` is", "a boolean, which is no number")):
        parse(written_over_base(written))


def test_parse_boolean_where_booleans_and_words_are_taken_is_accepted() -> None:
    finetune = parse(
        written_over_base("finetune: {gradient_checkpointing: yes, cpu_offload: off, seq_packing: 1}")
    ).finetune
    assert (finetune.gradient_checkpointing, finetune.cpu_offload, finetune.seq_packing) == (True, False, True)


def test_parse_number_with_a_unit_names_the_unit_of_its_key() -> None:
    given = ["finetune.save_checkpoint_minutes=30m", "weights.bucket_mb=128MB"]
    with pytest.raises(ConfigError) as refused:
        parse(compose("base", [*REQUIRED, *given]))
    minutes, megabytes = sorted(str(refused.value).split("; "))
    assert re.search(says("finetune.save_checkpoint_minutes", "30m", "minutes"), minutes)
    assert re.search(says("weights.bucket_mb", "128MB", "megabytes"), megabytes)


def test_parse_missing_section_says_where_defaults_come_from() -> None:
    with pytest.raises(ConfigError, match=says("`seed`", "missing", "`defaults: [base, _self_]`")):
        parse(OmegaConf.create({"output_dir": "x"}))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("learning_rate", "finetune.learning_rate"),
        ("finetune.learnin_rate", "finetune.learning_rate"),
        ("world.actor_fractoin", "world.actor_fraction"),
        ("rollout_policy", "actor.rollout_policy"),
        ("output_dirr", "output_dir"),
        ("zzz", None),
    ],
)
def test_nearest_key_finds_what_was_meant(typed: str, meant: str | None) -> None:
    assert nearest_key(typed, [key for key in config_keys() if not key.startswith("domains")]) == meant


@pytest.mark.parametrize(
    ("key", "free"),
    [("llm.parameters.top_p", True), ("environment.turns", True), ("finetune.nope", False), ("nope", False)],
)
def test_is_free_form_knows_the_users_sections(key: str, free: bool) -> None:
    assert is_free_form(key) is free


def with_own_keys(extra_keys: list[str]) -> object:
    cfg = compose("base", REQUIRED)
    with open_dict(cfg):
        cfg.sandbox_timeout, cfg.actor.agent_max_loops, cfg.extra_keys = 10.0, 3, extra_keys
    return parse(cfg)


def test_extra_keys_are_the_domains_own_and_others_are_refused() -> None:
    assert with_own_keys(["sandbox_timeout", "actor.agent_max_loops"])
    with pytest.raises(ConfigError, match=says("`actor.agent_max_loops`", "`extra_keys: [actor.agent_max_loops]`")):
        with_own_keys(["sandbox_timeout"])


@pytest.mark.parametrize(
    ("key", "said"),
    [("seed", "key of the project"), ("llm.parameters.top_p", "key of the project"), ("a.b", "no value")],
)
def test_extra_keys_name_keys_that_are_there_and_not_the_projects(key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=says("`extra_keys`", repr(key), said)):
        with_own_keys(["sandbox_timeout", "actor.agent_max_loops", key])


YAML = """
numbers: [1e-5, 1.0e-5, .5, 1_000, 0o17, 017, 1:30, .inf, -3]
words: [on, yes, "yes", ~, null, 2026-11-28, 1.2.3, '007', 5:30:00.5]
nested: {1: {a: []}, true: {}}
text: |
  two
  lines
"""


@pytest.mark.parametrize("reference", ["", "again: ${text}\n"])
def test_run_folder_is_read_as_omegaconf_reads_it(reference: str, tmp_path: Path) -> None:
    """With a reference OmegaConf itself does."""
    (tmp_path / "config.yaml").write_text(YAML + reference)
    expected = OmegaConf.to_container(OmegaConf.create(YAML + reference), resolve=True)
    assert repr(_read_container(tmp_path / "config.yaml")) == repr(expected)


def test_key_that_is_twice_in_a_run_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\na: 2\n")
    with pytest.raises(yaml.YAMLError, match="duplicate key a"):
        _read_container(tmp_path / "config.yaml")


def test_load_run_reads_back_what_was_written(tmp_path) -> None:
    cfg = compose("base", REQUIRED)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_container(cfg))))
    assert load_run(tmp_path) == parse(cfg)
    assert load_run_dictconfig(tmp_path).finetune.rl.final_kl_coef == 0.0


@pytest.mark.parametrize(("written", "read"), [({}, "off"), ({"share_prefixes": "auto"}, "auto")])
def test_run_of_before_a_key_is_read_as_it_was_computed(written: dict[str, str], read: str, tmp_path: Path) -> None:
    container = to_container(compose("base", REQUIRED))
    del container["finetune"]["share_prefixes"]
    container["finetune"] |= written
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(yaml.safe_dump(container))
    assert load_old_run(tmp_path).finetune.share_prefixes == read


def test_load_run_elsewhere_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=says(tmp_path, "run folder")):
        load_run(tmp_path)


@pytest.mark.parametrize("text", [b"a: {\n", b"- 1\n", b"- ${x}\n", b"", b"\xff\xfe\x00"])
def test_damaged_configuration_of_a_run_is_refused_with_its_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "conf" / "config.yaml"
    path.parent.mkdir()
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=says(str(path), "force_restart=true")):
        load_run(tmp_path)


def test_resolve_function_finds_functions_and_classes() -> None:
    assert resolve_function("os.path.join").__name__ == "join"
    assert resolve_function("collections.OrderedDict.fromkeys").__name__ == "fromkeys"


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("os.path.nope", "posixpath has no 'nope'"),
        ("nope.module.function", "no module 'nope'"),
        ("function", "write package.module.function"),
        ("os.sep", says("`os.sep`", "function", "str")),
    ],
)
def test_resolve_function_says_what_is_wrong(dotted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_function(dotted)


def test_resolve_function_names_the_module_that_a_module_lacks(tmp_path, monkeypatch) -> None:
    (tmp_path / "lame_domain.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="lame_domain needs module 'surely_not_installed'"):
        resolve_function("lame_domain.load")


def test_validate_key_of_an_entry_that_base_does_not_have_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"^`tiny_model.seed` must be given; `tiny_model.params` must be given$"):
        validate(compose("base", [*REQUIRED, "tiny_model={recipe: largest}"]))
