"""Servers that somebody else runs: a warning for another model; `tests/integration/test_alone.py` asks real ones."""

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.launcher.existing import compare

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"root": "/models/Qwen2.5-7B", "max_model_len": 10000}, []),
        ({}, []),
        ({"root": "/models/other"}, ["serves /models/other, and model_path is Qwen/Qwen2.5-7B"]),
        (
            {"root": "Qwen2.5-7B", "max_model_len": 4096},
            ["takes 4096 tokens, and vllm_config.vllm_kwargs.max_model_len"],
        ),
    ],
)
def test_difference_between_server_and_configuration_is_a_warning(entry: dict, said: list[str]) -> None:
    warnings = compare("http://a:1", entry, parse(compose("base", REQUIRED)))
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))
