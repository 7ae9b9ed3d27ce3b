"""Sampling parameters of the configuration, compared with vLLM's before a server starts."""

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.launcher.vllm_options import sampling_parameters
from tests.says import says


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
def test_unknown_parameter_is_refused_with_the_key_and_the_nearest_name() -> None:
    from pipelinerl.inference.answers import SAMPLING_PARAMETERS, require_sampling_parameters

    assert set(sampling_parameters()) == SAMPLING_PARAMETERS, "what the launcher reads from vLLM's source"
    require_sampling_parameters("llm", {"max_tokens": 5, "temperature": 1.0, "stop": ["\n"]})
    with pytest.raises(ConfigError, match=says("test_llm.parameters.max_tokns", "max_tokens")):
        require_sampling_parameters("test_llm", {"max_tokns": 5})
