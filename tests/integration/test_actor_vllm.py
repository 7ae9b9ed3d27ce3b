"""The actor's client against a real vLLM server: what is trained is what the server was given and sampled."""

from typing import Any

import aiohttp
import numpy as np
from omegaconf import OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult


async def two_turns(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    messages = [{"role": "user", "content": problem["question"]}]
    calls = [await llm_async_generate(llm, Prompt(messages=messages), session)]
    messages += [calls[0].output.to_message(), {"role": "user", "content": "And then?"}]
    calls.append(await llm_async_generate(llm, Prompt(messages=messages), session))
    metrics = BaseMetrics(reward=0.5, success=True, no_error=True, no_answer=False)
    texts = [make_training_text(llm, call) for call in calls]
    return RolloutResult(training_texts=texts, metrics=metrics, latency=0.0)


async def label_weights(session: aiohttp.ClientSession, server: Any, version: str) -> None:
    """What the trainer's first update does to the label; without one, completions are refused."""
    headers = {"Authorization": f"Bearer {server.secret}"}
    url = f"{server.job.url}/update_weight_version"
    async with session.post(url, json={"new_version": version}, headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_group_of_two_turn_rollouts_has_exact_tokens_logprobs_and_versions(vllm_server: Any) -> None:
    llm = TrainableLLM(
        model_name="policy",
        tokenizer_name=model_path(vllm_server),
        parameters={"max_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        collect_logprobs=True,
    )
    llm.load_tokenizer()
    limits = RequestLimits(timeout_s=120, max_retries=1, max_completions=8)
    rules = RolloutRules(timeout_s=120, seq_length=2048)
    async with aiohttp.ClientSession() as session:
        await label_weights(session, vllm_server, "0")
        executor = Executor(OmegaConf.create({}), [two_turns], (llm, llm), Client(session, limits), rules)
        executor.servers.update({"actor_llm_0": vllm_server.job.url}, {"actor_llm_0": 0})
        start = StartGroup(
            task_id=1,
            group_id="0-0",
            domain=0,
            problem={"question": "Tell me"},
            attempts=(0, 1, 2, 3),
            evaluation=False,
            version=0,
        )
        finished = await run_whole_group(executor, start)
        assert finished.failures == ()
        for rollout in finished.rollouts:
            (sequence,) = rollout.sequences
            assert sequence.spans[:, 2].tolist() == [0] * len(sequence.spans)
            trained = np.concatenate([np.arange(start, end) for start, end, _ in sequence.spans])
            assert len(trained) == len(sequence.logprobs)
            scored = await prompt_logprobs(session, vllm_server.job.url, sequence.token_ids.tolist())
            np.testing.assert_allclose(sequence.logprobs, scored[trained], atol=2e-5)


def model_path(server: Any) -> str:
    return str(OmegaConf.load(server.run_dir / "conf" / "config.yaml").model_path)


async def prompt_logprobs(session: aiohttp.ClientSession, url: str, token_ids: list[int]) -> np.ndarray:
    """The server's own log-probability of every given token."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body = {"model": "policy", "token_ids": token_ids, "sampling_params": params}
    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
        scores = (await response.json())["prompt_logprobs"]
    return np.array([0.0] + [scores[i][str(token_ids[i])]["logprob"] for i in range(1, len(token_ids))])
