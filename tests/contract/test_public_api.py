"""The surface that a user's domain stands on: import paths, field names, signatures. A domain written for PipelineRL's
README runs unchanged."""

import inspect
import re
import subprocess
import sys
import time
from typing import Any

import aiohttp
import pytest
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import LLMCall, LLMOutput, Prompt, TokenLogprob, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText
from pipelinerl.testing import FakeLLM, run_rollout

FIELDS = {
    TrainingText: {
        "text", "n_predicted", "reward", "logprobs", "ref_logprobs", "input_ids", "labels", "group_id", "finished",
        "prompt_tokens", "output_tokens", "visual_features", "metadata",
    },
    RolloutResult: {"training_texts", "metrics", "latency", "model_version", "dataset_name", "group_id", "rewards",
                    "domain"},
    BaseMetrics: {"reward", "success", "no_error", "no_answer"},
    Prompt: {"id", "tools", "messages", "token_ids", "response_format"},
    TokenLogprob: {"logprob", "token_id"},
    LLMOutput: {"role", "content", "tool_calls"},
    LLMCall: {
        "timestamp", "prompt", "output", "prompt_length_tokens", "output_length_tokens", "cached", "model_version",
        "llm_info", "cost", "logprobs",
    },
    TrainableLLM: {
        "base_url", "model_name", "tokenizer_name", "tokenizer", "parameters", "context_size", "collect_logprobs",
        "chat_template_kwargs", "renderer", "tool_parser", "reasoning_parser", "api_token", "max_retries",
        "base_delay",
    },
}  # fmt: skip


@pytest.mark.parametrize("model", FIELDS, ids=lambda model: model.__name__)
def test_models_have_exactly_these_fields(model: type) -> None:
    assert set(model.model_fields) == FIELDS[model]  # type: ignore[attr-defined]


def test_functions_keep_their_arguments() -> None:
    assert list(inspect.signature(llm_async_generate).parameters) == ["llm", "prompt", "session", "max_tokens_override"]
    assert inspect.iscoroutinefunction(llm_async_generate)
    assert list(inspect.signature(make_training_text).parameters) == ["llm", "llm_call"]
    assert list(inspect.signature(Prompt.from_user_message).parameters) == ["content"]


def test_other_public_import_paths_exist() -> None:
    from pipelinerl.finetune.data import MASKED_TOKEN_ID
    from pipelinerl.state import TrainerState
    from pipelinerl.streams import (
        SingleStreamSpec,
        StreamRangeSpec,
        read_stream,
        set_streams_backend,
        write_to_streams,
    )
    from pipelinerl.world import Job, WorldMap

    for name in (TrainerState, SingleStreamSpec, StreamRangeSpec, WorldMap, Job):
        assert inspect.isclass(name)
    for name in (read_stream, set_streams_backend, write_to_streams):
        assert callable(name)
    assert MASKED_TOKEN_ID == -100


def test_public_modules_load_neither_torch_nor_vllm() -> None:
    modules = "pipelinerl.async_llm, pipelinerl.llm, pipelinerl.rollouts, pipelinerl.testing, pipelinerl.actor.role"
    check = f"import sys, {modules}; print([m for m in ('torch', 'vllm', 'deepspeed') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_llm_takes_the_arguments_that_pipelinerl_takes() -> None:
    llm = TrainableLLM(
        base_url="http://127.0.0.1:8080",
        model_name="m",
        tokenizer_name="t",
        parameters={"max_tokens": 8},
        collect_logprobs=True,
    )
    assert (llm.context_size, llm.tokenizer, llm.chat_template_kwargs, llm.api_token) == (32000, None, {}, "")
    assert callable(llm.load_tokenizer)


class GameMetrics(BaseMetrics):
    num_turns: int


async def play(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """A game in the manner of PipelineRL's README: the history is told anew in every turn."""
    begin = time.time()
    task = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Guess a number between 1 and 1024, as <answer>number</answer>."},
    ]
    calls, guesses = [], []
    reward, success, error = 0.0, 0, 0
    for i in range(13):
        messages = task.copy()
        if guesses:
            told = [f"{g} is {'lower' if g < problem['answer'] else 'higher'} than the number." for g in guesses]
            messages.append({"role": "user", "content": "\n".join(told)})
        llm_call = await llm_async_generate(llm, Prompt(messages=messages), session)
        calls.append(llm_call)
        found = re.search(r"<answer>(\d+)</answer>", llm_call.output.content or "")
        if not found:
            reward, error = -2 + i / 10, 1
            break
        guesses.append(int(found.group(1)))
        if guesses[-1] == problem["answer"]:
            reward, success = 2 - i / 10, 1
            break
    texts = [make_training_text(llm, call) for call in calls]
    for text in texts:
        text.reward = reward
    metrics = GameMetrics(
        reward=reward, success=success, no_error=not error, no_answer=error, num_turns=len(calls)
    )  # PipelineRL's domains give ints where the field is a bool
    return RolloutResult(
        training_texts=texts, metrics=metrics, latency=time.time() - begin, dataset_name=problem["dataset"]
    )


@pytest.mark.parametrize(
    ("replies", "reward", "success"),
    [
        (["<answer>512</answer>", "<answer>256</answer>", "<answer>300</answer>"], 1.8, True),
        (["<answer>512</answer>", "hm"], -1.9, False),
    ],
)
async def test_domain_written_for_pipelinerl_runs_unchanged(replies: list[str], reward: float, success: bool) -> None:
    result = await run_rollout(play, {"answer": 300, "dataset": "train"}, replies)
    assert [text.reward for text in result.training_texts] == [pytest.approx(reward)] * len(replies)
    assert (result.metrics.success, result.metrics.num_turns) == (success, len(replies))  # type: ignore[attr-defined]
    assert all(len(text.labels) == len(text.input_ids) for text in result.training_texts)
    assert all(sum(label != -100 for label in t.labels) == len(t.logprobs) for t in result.training_texts)


async def test_fake_llm_can_be_used_directly() -> None:
    def reply(prompt: str) -> str:
        return "yes" if "?" in prompt else "no"

    llm: Any = FakeLLM.saying(reply)
    async with aiohttp.ClientSession() as session:
        call = await llm_async_generate(llm, Prompt.from_user_message("really?"), session)
    assert call.output.content == "yes"
