"""Servers that somebody else runs: a warning for another model. `integration/test_debug_modes.py` asks real ones."""

import json
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.existing_servers import compare
from tests.says import says

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


@pytest.mark.parametrize(
    ("served", "wanted", "is_refused"),
    [(4096, 4096, False), (4097, 4096, True), (131072, 8192, False), (4000, 8192, True)],
)
def test_server_with_other_factors_of_longrope_is_refused(
    served: int, wanted: int, is_refused: bool, tmp_path: Path
) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    limits = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "rope_scaling": rope} | limits))
    given = [f"model_path={tmp_path}", f"vllm_config.vllm_kwargs.max_model_len={wanted}"]
    config = parse(compose("base", [*REQUIRED, *given]))
    if not is_refused:
        compare("http://a:1", {"max_model_len": served}, config)
        return
    with pytest.raises(ConfigError, match=says("max_model_len", served, wanted, 4096)):
        compare("http://a:1", {"max_model_len": served}, config)
