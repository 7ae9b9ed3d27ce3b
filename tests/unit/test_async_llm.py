"""Requests at the limits of a prompt's length and of a log-probability."""

import numpy as np
import pytest

from pipelinerl.async_llm import read_answer, refuse_too_long
from pipelinerl.errors import ServerError
from pipelinerl.llm import GenerateRequest, TrainableLLM
from pipelinerl.records.answers import Answer, Completion
from pipelinerl.streams.codec import Codec


def test_prompt_has_at_most_ten_characters_per_token_of_the_context() -> None:
    llm = TrainableLLM(model_name="m", context_size=100)
    refuse_too_long(llm, [{"role": "user", "content": "a" * (1000 - len("user"))}], None)
    with pytest.raises(ServerError, match="1001 characters"):
        refuse_too_long(llm, [{"role": "user", "content": "a" * (1001 - len("user"))}], None)


def test_logprob_that_vllm_sends_for_none_is_a_failure_of_the_server() -> None:
    request = GenerateRequest(
        token_ids=np.array([1], dtype=np.int32), body_key=b'{"logprobs":0}', model="m", retries=0, base_delay_s=0.0
    )

    def answered(logprob: float) -> bytes:
        completion = Completion(
            token_ids=np.array([5], dtype=np.int32),
            logprobs=np.array([logprob], dtype=np.float32),
            version_spans=None,
            finish_reason="stop",
        )
        return Codec(Answer).encode(Answer(completions=(completion,)))

    assert len(read_answer(answered(-9998.0), request, 1)) == 1
    with pytest.raises(ServerError, match="no log-probability"):
        read_answer(answered(-9999.0), request, 1)
