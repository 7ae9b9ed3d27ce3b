"""One spelling per server option."""

import pytest

from pipelinerl.config.load import compose, parse, parse_container, to_container
from pipelinerl.config.nested import with_settings
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import (
    devices_per_server,
    first_capacity,
    max_model_len,
    most_rollouts,
    probe_tolerance,
    with_plain_options,
)
from pipelinerl.errors import ConfigError
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


def config(**options: object) -> Config:
    return parse_container(with_settings(to_container(compose("base", REQUIRED)), {"vllm_config.vllm_kwargs": options}))


def test_server_options_have_dashes_and_no_negations() -> None:
    given = {"max_model_len": 5, "no-enable-prefix-caching": "", "no_async": True, "no_eager": False, "dtype": "half"}
    assert config(**given).vllm_config.vllm_kwargs == {
        "max-model-len": 5,
        "enable-prefix-caching": False,
        "async": False,
        "eager": True,
        "dtype": "half",
    }


def test_option_whose_name_yaml_reads_as_a_boolean_is_text() -> None:
    found = with_plain_options({"vllm_config": {"vllm_kwargs": {False: 1}}})  # `no: 1`
    assert found == {"vllm_config": {"vllm_kwargs": {"False": 1}}}


def test_part_of_an_option_keeps_its_name_behind_the_dot() -> None:
    parts = {"hf_overrides.rope_theta": 5.0, "compilation_config.pass_config.fuse_norm_quant+": "x"}
    assert config(**parts).vllm_config.vllm_kwargs == {
        "hf-overrides.rope_theta": 5.0,
        "compilation-config.pass_config.fuse_norm_quant+": "x",
    }
    with pytest.raises(ConfigError, match=says("hf_overrides and hf-overrides.rope_theta", "set hf_overrides alone")):
        config(**{"hf-overrides.rope_theta": 5.0, "hf_overrides": {"head_dtype": "float32"}})


def test_server_options_named_twice_must_agree() -> None:
    agreeing = config(**{"max_model_len": 5, "max-model-len": 5})
    assert agreeing.vllm_config.vllm_kwargs == {"max-model-len": 5}
    with pytest.raises(ConfigError, match=says("max_model_len=5", "max-model-len=6")):
        config(**{"max_model_len": 5, "max-model-len": 6})


@pytest.mark.parametrize(
    ("options", "length"),
    [({}, None), ({"max_model_len": None}, None), ({"max-model-len": 5}, 5), ({"max_model_len": "5"}, 5)],
)
def test_max_model_len_is_found_in_either_spelling(options: dict[str, object], length: int | None) -> None:
    assert max_model_len(config(**options)) == length


def test_server_takes_32_rollouts_at_first_and_1024_at_most_unless_the_user_says() -> None:
    assert (first_capacity(config()), most_rollouts(config())) == (32, 1024)
    given = parse(compose("base", [*REQUIRED, "actor.llm_max_rollouts=7"]))
    assert (first_capacity(given), most_rollouts(given)) == (7, 7)


@pytest.mark.parametrize("length", [0, -1, "10k", "auto", True])
def test_max_model_len_that_is_no_number_of_tokens_is_refused(length: object) -> None:
    with pytest.raises(
        ConfigError, match=says("`vllm_config.vllm_kwargs.max_model_len`", repr(length), "tokens", "null")
    ):
        max_model_len(config(max_model_len=length))


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({}, 1),
        ({"tensor-parallel-size": 2, "pipeline-parallel-size": 4}, 8),
        ({"tensor_parallel_size": "2"}, 2),
        ({"tensor_parallel_size": None}, 1),
    ],
)
def test_devices_per_server_is_tensor_times_pipeline(options: dict, devices: int) -> None:
    assert devices_per_server(config(**options)) == devices


@pytest.mark.parametrize("size", [-1, "two", 1.5])
def test_devices_per_server_refuses_what_is_no_size(size: object) -> None:
    with pytest.raises(ConfigError, match=says("`vllm_config.vllm_kwargs`", f"{size} × 1", "whole numbers")):
        devices_per_server(config(tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("base", "overrides", "tolerance"),
    [
        ("base", [], 0.2),
        ("base", ["finetune.dtype=float16"], 0.2),
        ("base", ["finetune.dtype=float32"], 1e-3),
        ("base", ["finetune.dtype=float32", "vllm_config.vllm_kwargs.dtype=bfloat16"], 0.2),
        ("base", ["vllm_config.vllm_kwargs.dtype=float32"], 0.2),
        ("base", ["finetune.dtype=float32", "vllm_config.vllm_kwargs.dtype=float32"], 1e-3),
        ("base", ["finetune.dtype=float32", "vllm_config.vllm_kwargs.dtype=float"], 1e-3),
        ("base_cpu", [], 1e-3),
        ("base_cpu", ["weights.probe_tolerance=0.05"], 0.05),
    ],
)
def test_tolerance_of_the_probe_is_that_of_the_data_types(base: str, overrides: list[str], tolerance: float) -> None:
    assert probe_tolerance(parse(compose(base, [*REQUIRED, *overrides]))) == tolerance
