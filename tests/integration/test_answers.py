"""The answer route of a real vLLM server: prefix caching that is exact across updates, errors, clients that go away."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import msgspec
import numpy as np
import pytest
from omegaconf import OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.executor import Executor, RolloutRules
from pipelinerl.actor.messages import StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.inference.args import CPU_BLOCK
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.records.answers import (
    ANSWER_PATH,
    REQUEST_NAME,
    UNDER_WAY_PATH,
    Answer,
    AnswerRequest,
    Completion,
    RequestUnderWay,
    UnderWay,
)
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.streams.codec import Codec
from tests.integration.test_server import TOLERANCE, Trainer, error_of, versions_of
from tests.sender_kit import Senders

BLOCK = CPU_BLOCK
OTHER_VERSION = 90_000
"""Of which no other test of this file sends weights."""
NONE = RequestUnderWay(tokens=(), waits=False)
PROMPT = [(7 * i) % 251 + 1 for i in range(3 * BLOCK + 5)]


def encoded(prompt: list[int], *, max_tokens: int = 40, n: int = 1, **fields: Any) -> bytes:
    sampling = {"n": n, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    fields = {"model": "policy", "sampling": sampling} | fields
    return Codec(AnswerRequest).encode(AnswerRequest(token_ids=np.array(prompt, dtype=np.int32), **fields))


def ask(url: str, prompt: list[int], **fields: Any) -> list[Completion]:
    response = httpx.post(url + ANSWER_PATH, content=encoded(prompt, **fields), timeout=120)
    assert response.status_code == 200, response.text
    return list(Codec(Answer).decode(response.content).completions)


class Run:
    """A trainer that sends a new version to a server."""

    def __init__(self, server: Any, model: Path):
        self.url, self.server = server.job.url, server
        self.trainer = Trainer(model)
        self.senders = Senders(server, timeout_s=60, secret=server.secret)

    def update(self, version: int) -> None:
        self.trainer.next_version(version)
        self.trainer.send(self.senders, version)


@pytest.fixture
def run(vllm_server: Any, tiny_qwen2: Path) -> Iterator[Run]:
    run = Run(vllm_server, tiny_qwen2)
    yield run
    run.senders.sender.close()


def test_attempts_of_a_group_share_the_prompts_prefill(run: Run) -> None:
    run.update(1)
    choices = ask(run.url, PROMPT, n=8)
    assert sorted(choice.cached_tokens for choice in choices)[1:] == [3 * BLOCK] * 7
    assert max(error_of(run.trainer, choice, PROMPT) for choice in choices) <= TOLERANCE


def under_way(run: Run, prefix: str) -> UnderWay:
    headers = {"Authorization": f"Bearer {run.server.secret}"}
    answer = httpx.get(run.url + UNDER_WAY_PATH, params={"prefix": prefix}, headers=headers, timeout=60)
    return msgspec.json.decode(answer.content, type=UnderWay)


def test_server_says_how_far_the_answers_of_a_client_are_until_they_end(run: Run) -> None:
    """Two answers to one request, each with the tokens it has, and none of another client's or without a name."""
    assert httpx.get(run.url + UNDER_WAY_PATH, timeout=60).status_code == 401
    length, body = 500, encoded(PROMPT[:20], max_tokens=500, n=2)
    counts: list[int] = []
    while len(set(counts)) <= 2:  # of answers that end before they were looked at so often, others are looked at
        seen, before = list[UnderWay](), under_way(run, "").sampled
        with ThreadPoolExecutor(2) as pool:
            theirs, ours = (
                pool.submit(httpx.post, run.url + ANSWER_PATH, content=body, headers={REQUEST_NAME: name}, timeout=600)
                for name in ("b-1", "a-1")
            )
            while not ours.done():
                seen.append(under_way(run, "a-"))
            answer, other = ours.result(), theirs.result()
        assert (answer.status_code, other.status_code) == (200, 200), answer.text
        assert {name for told in seen for name in told.requests} <= {"a-1"}
        counts = [sum(told.requests["a-1"].tokens) for told in seen if len(told.requests.get("a-1", NONE).tokens) == 2]
        assert counts == sorted(counts)
        assert max(counts, default=0) <= 2 * length
        assert under_way(run, "").sampled - before > 2 * length, "the other client's tokens count, too"
    assert under_way(run, "").requests == {}


def test_conversation_is_computed_anew_by_new_weights_and_found_again_under_them(run: Run) -> None:
    """Turns of one rollout, an update after the first: no key or value of the old weights is read."""
    run.update(11)
    (first,) = ask(run.url, PROMPT, max_tokens=BLOCK)
    history = PROMPT + first.token_ids.tolist() + [9, 8, 7]
    run.update(12)
    (second,) = ask(run.url, history, prefix_version=11)
    assert versions_of(second) == [12]
    assert second.cached_tokens == 0
    computed = history + second.token_ids.tolist()[:-1]  # nothing was sampled behind the last token
    longer = history + second.token_ids.tolist() + [9, 8, 7]
    (third,) = ask(run.url, longer, prefix_version=11)
    assert third.cached_tokens == len(computed) // BLOCK * BLOCK
    assert error_of(run.trainer, second, history) <= TOLERANCE
    assert error_of(run.trainer, third, longer) <= TOLERANCE


def test_version_that_comes_again_with_other_weights_finds_nothing_of_its_first_time(run: Run) -> None:
    """As from a trainer that restarted at its last checkpoint."""
    for version in (15, 16, 15, 16):
        run.update(version)
        first, second = (ask(run.url, PROMPT)[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 3 * BLOCK)
        assert versions_of(first) == versions_of(second) == [version]
        assert max(error_of(run.trainer, choice, PROMPT) for choice in (first, second)) <= TOLERANCE


def first_versions(choices: list[Completion]) -> set[int]:
    return {versions_of(choice)[0] for choice in choices}


async def test_requests_that_wait_or_prefill_during_updates_never_read_older_blocks(run: Run) -> None:
    """More requests of one prompt than the server decodes at once, until answers began under three versions."""
    run.update(21)
    async with aiohttp.ClientSession() as session:

        async def one() -> Completion:
            async with session.post(run.url + ANSWER_PATH, data=encoded(PROMPT, max_tokens=30)) as response:
                assert response.status == 200
                return Codec(Answer).decode(await response.read()).completions[0]

        choices: list[Completion] = []
        version, pending = 21, {asyncio.create_task(one()) for _ in range(100)}
        while len(first_versions(choices)) < 3 or version < 24:
            version += 1
            await asyncio.to_thread(run.update, version)
            done = {task for task in pending if task.done()}
            choices += [task.result() for task in done]
            pending = pending - done | {asyncio.create_task(one()) for _ in done}
        choices += await asyncio.gather(*pending)
    assert sum(choice.cached_tokens > 0 for choice in choices) > len(choices) / 2
    assert max(error_of(run.trainer, choice, PROMPT) for choice in choices) <= TOLERANCE


def test_stop_string_ends_a_completion_and_keeps_logprobs_and_versions(run: Run) -> None:
    run.update(41)
    sampling = {"max_tokens": 400, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "stop": ["a", "e", "i"]}
    (choice,) = ask(run.url, PROMPT, sampling=sampling)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.token_ids)
    assert versions_of(choice) == [41]
    assert error_of(run.trainer, choice, PROMPT) <= TOLERANCE


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "not an answer request"),
        (encoded([1], model="other"), 404, "model is 'policy', not 'other'"),
        (encoded([]), 400, "non-empty"),
        (encoded([-1]), 400, "negative"),
        (encoded([1], format=3), 400, "format 3"),
        (encoded([1], images=(b"x",)), 400, "takes no images"),
        (encoded([1] * 3000), 400, "2048"),
        (encoded([10**6]), 400, "vocab"),
        (encoded([1], sampling={"temperature": -1.0}), 400, "temperature"),
        (encoded([1], sampling={"temprature": 1.0}), 400, "temprature"),
        (encoded([1], sampling={"max_tokens": "many"}), 400, "max_tokens"),
    ],
)
def test_request_that_can_never_be_answered_says_why(vllm_server: Any, body: bytes, status: int, message: str) -> None:
    response = httpx.post(vllm_server.job.url + ANSWER_PATH, content=body, timeout=60)
    assert response.status_code == status, response.text
    assert message in response.json()["error"]["message"]


async def test_client_that_goes_away_ends_its_requests(vllm_server: Any, serving: Any) -> None:
    def wait_for_requests(count: int) -> None:
        status = vllm_server.run_dir / "status" / "actor_llm_0.json"
        serving.wait_for(
            lambda: msgspec.json.decode(status.read_bytes())["fields"].get("requests") == count, 60, vllm_server.log
        )

    async with aiohttp.ClientSession() as session:
        body = encoded([5, 6, 7], max_tokens=2000, n=8)
        task = asyncio.create_task(session.post(vllm_server.job.url + ANSWER_PATH, data=body))
        await asyncio.to_thread(wait_for_requests, 8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.to_thread(wait_for_requests, 0)


async def two_turns(cfg: Any, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    messages = [{"role": "user", "content": problem["question"]}]
    calls = [await llm_async_generate(llm, Prompt(messages=messages), session)]
    messages += [calls[0].output.to_message(), {"role": "user", "content": "And then?"}]
    calls.append(await llm_async_generate(llm, Prompt(messages=messages), session))
    metrics = BaseMetrics(reward=0.5, success=True, no_error=True, no_answer=False)
    texts = [make_training_text(llm, call) for call in calls]
    return RolloutResult(training_texts=texts, metrics=metrics, latency=0.0)


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path, serving: Any) -> Any:
    """With vLLM's development route for the label of the weights."""
    development = ("+vllm_config.env={VLLM_SERVER_DEV_MODE: '1'}",)
    with serving.running(tmp_path_factory.mktemp("run"), tiny_qwen2, overrides=development) as server:
        yield server


async def label_weights(session: aiohttp.ClientSession, server: Any, version: str) -> None:
    """What an update does to the label."""
    headers = {"Authorization": f"Bearer {server.secret}"}
    url = f"{server.job.url}/update_weight_version"
    async with session.post(url, json={"new_version": version}, headers=headers) as response:
        assert response.status == 200, await response.text()


async def test_group_of_two_turn_rollouts_has_exact_tokens_logprobs_and_versions(vllm_server: Any) -> None:
    """The actor's client: what is trained is what the server was given and sampled."""
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
        await label_weights(session, vllm_server, str(OTHER_VERSION))
        executor = Executor(OmegaConf.create({}), [two_turns], (llm, llm), Client(session, limits), rules)
        executor.servers.update({"actor_llm_0": vllm_server.job.url}, {"actor_llm_0": OTHER_VERSION})
        start = StartGroup(
            task_id=1,
            group_id="0-0",
            domain=0,
            problem={"question": "Tell me"},
            attempts=(0, 1, 2, 3),
            evaluation=False,
            version=OTHER_VERSION,
        )
        finished = await run_whole_group(executor, start)
        assert finished.failures == ()
        for rollout in finished.rollouts:
            (sequence,) = rollout.sequences
            assert sequence.spans[:, 2].tolist() == [OTHER_VERSION] * len(sequence.spans)
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
