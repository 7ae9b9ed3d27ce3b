"""Sampling parameters of the configuration, compared with vLLM's before a server starts."""

import pytest

from pipelinerl.errors import ConfigError
from tests.says import says


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported
def test_unknown_parameter_is_refused_with_the_key_and_the_nearest_name() -> None:
    from pipelinerl.inference.answers import require_sampling_parameters

    require_sampling_parameters("llm", {"max_tokens": 5, "temperature": 1.0, "stop": ["\n"]})
    with pytest.raises(ConfigError, match=says("test_llm.parameters.max_tokns", "max_tokens")):
        require_sampling_parameters("test_llm", {"max_tokns": 5})
