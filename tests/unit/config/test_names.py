"""Other names of keys are translated once, when a configuration is read."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose, parse, parse_container, to_container
from pipelinerl.config.names import NAMES, with_one_name, with_other_names
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.command_line import with_right_plus
from tests.says import says

REQUIRED = ["output_dir=/tmp/x", "model_path=m", "actor.rollout_policy=a.b", "dataset_loader=c.d"]


def base(*overrides: str) -> dict[str, Any]:
    return to_container(compose("base", [*REQUIRED, *overrides]))


def test_other_names_are_no_keys_inside() -> None:
    config = parse_container(base("finetune.fp32_lm_head=false", "finetune.rl.temperature=0.7", "use_fsdp=true"))
    assert (config.fp32_lm_head, config.llm.temperature, config.finetune.engine) == (False, 0.7, "fsdp2")
    assert config.llm.parameters["max_tokens"] == 8192
    container = base("use_deepspeed=false")
    assert not {name for name in NAMES if OmegaConf.select(OmegaConf.create(container), name) is not None}


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        ((), "auto"),
        (("use_deepspeed=true",), "auto"),
        (("use_deepspeed=true", "use_fsdp=false"), "auto"),
        (("use_deepspeed=false",), "ddp"),
        (("use_fsdp=true",), "fsdp2"),
        (("use_deepspeed=true", "finetune.engine=fsdp2"), "fsdp2"),
        (("use_deepspeed=false", "finetune.engine=deepspeed"), "deepspeed"),
    ],
)
def test_engine_is_chosen_by_pipelinerls_names_where_it_is_auto(overrides: tuple[str, ...], engine: str) -> None:
    assert parse_container(base(*overrides)).finetune.engine == engine


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (("finetune.rl.temperature=0.7", "llm.parameters.temperature=0.6"), ("finetune.rl.temperature", "0.7", "0.6")),
        (("use_deepspeed=true", "use_fsdp=true"), ("use_deepspeed", "use_fsdp")),
        (("use_fsdp=2",), ("use_fsdp", "2")),
    ],
)
def test_names_that_disagree_are_refused(overrides: tuple[str, ...], facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=says(*facts)):
        base(*overrides)


@pytest.mark.parametrize("given", ["use_fsdp=true", "+use_fsdp=true", "++use_fsdp=true"])
def test_command_line_adds_other_names(given: str) -> None:
    assert with_right_plus(given) == "++use_fsdp=true"


def test_other_name_without_a_value_is_refused_as_the_user_wrote_it() -> None:
    assert with_right_plus("use_fsdp") == "use_fsdp"


def test_interpolation_of_another_name_says_the_key() -> None:
    cfg = compose("base", [*REQUIRED, "++mine=${use_deepspeed}"])
    with pytest.raises(ConfigError, match=says("use_deepspeed", "finetune.engine")):
        parse(cfg)


def test_translation_changes_no_container_and_is_its_own_repetition() -> None:
    given = {"use_fsdp": True, "finetune": {"rl": {"temperature": 0.5}, "engine": "auto"}}
    once = with_one_name(given)
    assert given == {"use_fsdp": True, "finetune": {"rl": {"temperature": 0.5}, "engine": "auto"}}
    assert once == {"finetune": {"rl": {}, "engine": "fsdp2"}, "llm": {"parameters": {"temperature": 0.5}}}
    assert with_one_name(once) == once


@pytest.mark.parametrize("name", ["use_fsdp", "use_deepspeed", "finetune.fp32_lm_head", "finetune.rl.temperature"])
def test_other_name_that_is_null_is_as_not_given(name: str) -> None:
    assert parse_container(base(f"{name}=null")) == parse_container(base())


def test_domains_read_the_other_names_too() -> None:
    found = with_other_names(base("finetune.engine=ddp", "llm.parameters.temperature=0.9"))
    assert (found["use_deepspeed"], found["use_fsdp"]) == (False, False)
    assert (found["finetune"]["rl"]["temperature"], found["finetune"]["fp32_lm_head"]) == (0.9, True)
    assert with_one_name(found)["finetune"]["engine"] == "ddp"


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        ({"environments": {"dice": {"_target_": "a.B"}}}, [{"_target_": "a.B", "key": "dice"}]),
        ({"environments": [{"_target_": "a.B"}]}, [{"_target_": "a.B"}]),
        ({"environments": [], "environment": {"_target_": "a.B"}}, [{"_target_": "a.B", "key": "default"}]),
        ({"environments": {}, "environment": {"_target_": "a.B"}}, [{"_target_": "a.B", "key": "default"}]),
        ({"environments": [], "environment": {"free": 1}}, []),
        ({"environments": [{"_target_": "a.B"}], "environment": {"_target_": "a.C"}}, [{"_target_": "a.B"}]),
    ],
)
def test_environments_are_a_list_inside(given: dict[str, Any], listed: list[dict[str, Any]]) -> None:
    found = with_one_name(given)
    assert (found["environments"], found.get("environment")) == (listed, given.get("environment"))
    assert with_one_name(found) == found
