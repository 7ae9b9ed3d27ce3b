"""Agents of tapeagents ask the model of a rollout by `agenerate`. What would train other tokens is refused.

Also the dispatcher's less usual ways: a function that is not async, and problems without a domain.
"""

import aiohttp
import pytest
from omegaconf import DictConfig
from pydantic import BaseModel

from pipelinerl.async_llm import make_training_texts_from_llm_calls
from pipelinerl.domains.dispatcher import generate_multidomain_rollout
from pipelinerl.errors import DomainError
from pipelinerl.llm import LLMStream, Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeLLM


class ForeignPrompt(BaseModel):
    """The prompt of another framework with the same fields."""

    id: str = "7"
    tools: list[dict] | None = None
    messages: list[dict]
    response_format: dict | None = None


MESSAGES = [{"role": "user", "content": "?"}]


@pytest.mark.parametrize("prompt", [Prompt(id="7", messages=MESSAGES), ForeignPrompt(messages=MESSAGES)])
async def test_stream_has_the_sampled_tokens_of_the_call(prompt: BaseModel) -> None:
    llm = FakeLLM.saying(["yes"])
    async with aiohttp.ClientSession() as session:
        stream = await llm.model_copy().agenerate(prompt, session)
    assert isinstance(stream, LLMStream)
    assert (stream.get_output().content, stream.prompt.id) == ("yes", "7")
    call = stream.llm_call
    assert call is not None
    (text,) = make_training_texts_from_llm_calls(llm, [call], reward=0.5)
    assert (text.output_text, len(text.logprobs), text.reward) == ("yes<|im_end|>", 4, 0.5)
    assert llm.state.num_calls == 1


async def test_model_outside_a_rollout_says_which_function_to_call() -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(DomainError, match="call `llm_async_generate`"):
            await TrainableLLM(model_name="m").agenerate(Prompt(messages=MESSAGES), session)


def test_calls_that_block_or_tokenise_again_are_refused_with_the_way_to_go() -> None:
    llm = FakeLLM.saying(["yes"])
    with pytest.raises(DomainError, match=r"async_execute_agent.*run_agent"):
        llm.generate(Prompt(messages=MESSAGES))
    with pytest.raises(DomainError, match="store_llm_calls"):
        llm.make_training_text(Prompt(messages=MESSAGES), None)


def play_without_the_model(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    metrics = BaseMetrics(reward=0.0, success=False, no_error=True, no_answer=True)
    return RolloutResult(training_texts=[], metrics=metrics, latency=0.0)


async def test_problem_without_a_domain_is_of_the_runs_environment() -> None:
    name = f"{__name__}.{play_without_the_model.__name__}"
    cfg = DictConfig({"actor": {"domain_rollouts": {"riddles": name}}, "environment_key": "riddles"})
    async with aiohttp.ClientSession() as session:
        result = await generate_multidomain_rollout(cfg, FakeLLM.saying([]), {"task": "?"}, session)
    assert (result.domain, result.metrics.no_answer) == ("riddles", True)
