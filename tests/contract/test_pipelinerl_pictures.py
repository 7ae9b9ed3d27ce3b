"""A domain of charts with the imports and calls of PipelineRL's, written anew."""

import time
from pathlib import Path

import aiohttp
import pytest
from omegaconf import DictConfig, OmegaConf

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeLLM, run_rollout
from tests.says import says
from tests.vision import tokenizer_with_images

PROBLEM = {"task": "2 + 2?", "answer": "4", "dataset": "train"}


async def play_with_a_picture(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """A domain of charts."""
    start = time.time()
    picture = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,iVBORw0KGgo="}}
    content = [picture, {"type": "text", "text": problem["task"]}]
    call = await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": content}]), session)
    trace = make_training_text(llm, call)
    trace.reward = float(call.output.content == "4")
    metrics = BaseMetrics(reward=trace.reward, success=bool(trace.reward), no_error=True, no_answer=False)
    return RolloutResult(training_texts=[trace], metrics=metrics, latency=time.time() - start)


async def test_domain_with_pictures_runs_and_its_rollouts_hold_them(tmp_path: Path) -> None:
    llm = FakeLLM.saying(["4"], tokenizer=tokenizer_with_images(tmp_path))
    async with aiohttp.ClientSession() as session:
        result = await play_with_a_picture(OmegaConf.create({}), llm, PROBLEM, session)
    made = to_rollout(result, attempt=0, latency_s=1.0, num_llm_calls=1, fallback_version=0, seq_length=2048)
    assert made.images == (b"\x89PNG\r\n\x1a\n",)
    assert made.sequences[0].images is not None
    ((index, start, end),) = made.sequences[0].images.tolist()
    assert (index, llm.tokenizer.decode(made.sequences[0].token_ids[start:end])) == (0, "<image>")


async def test_domain_with_pictures_is_refused_for_a_model_of_text() -> None:
    with pytest.raises(DomainError, match=says("image", "a model that takes images")):
        await run_rollout(play_with_a_picture, PROBLEM, ["4"])
