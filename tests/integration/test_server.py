"""A real vLLM server: exact tokens, updates under load, dead and frozen senders, guarded control routes."""

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import torch

from pipelinerl.errors import ServerError, ServersExpelledError
from pipelinerl.preprocess.reference import score_sequences
from pipelinerl.records import ProbeMissed
from pipelinerl.records.answers import Completion
from pipelinerl.weights.verify.probe import ProbeText
from tests.says import says
from tests.sender_kit import Senders
from tests.served import sample

TOLERANCE = 2e-5
PROMPT = list(range(40, 60))


class Trainer:
    """The reference implementation: the same model in Hugging Face, one copy of its weights per version."""

    def __init__(self, model_path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        self._start = [param.detach().clone() for param in self.model.parameters()]
        self.versions: dict[int, dict[str, torch.Tensor]] = {}
        self._generator = torch.Generator().manual_seed(1)

    def next_version(self, version: int) -> None:
        """Move every parameter away from where it started, so that no stale one can go unnoticed."""
        with torch.no_grad():
            for start, param in zip(self._start, self.model.parameters(), strict=True):
                param.copy_(start + torch.randn(param.shape, generator=self._generator) * 0.03)
        self.versions[version] = copy.deepcopy(self.model.state_dict())

    def send(self, senders: Senders, version: int, **settings: Any) -> None:
        """Returns when the version is live on the server."""
        weights = {name: weight.detach() for name, weight in self.model.named_parameters()}
        (outcome,) = senders.send(version, weights, **settings).values()
        assert outcome.error == ""
        assert senders.sender.wait_live(version, 60)

    @torch.no_grad()
    def replay(self, prompt: list[int], tokens: list[int], spans: list[list[int]]) -> torch.Tensor:
        """Log-probabilities of sampled tokens, each under the weights of its version, older keys and values kept."""
        inputs, cache, parts, position = prompt + tokens, None, [], 0
        for first, last, version in spans:
            self.model.load_state_dict(self.versions[version])
            end = len(prompt) + last - 1
            output = self.model(torch.tensor([inputs[position:end]]), past_key_values=cache, use_cache=True)
            cache, position = output.past_key_values, end
            count = last - first
            targets = torch.tensor(tokens[first:last])
            logprobs = output.logits[0, -count:].log_softmax(-1)
            parts.append(logprobs.gather(1, targets[:, None])[:, 0])
        return torch.cat(parts)


def generate(url: str, *, max_tokens: int, prompt: list[int] = PROMPT, n: int = 1) -> list[Completion]:
    return sample(url, prompt, max_tokens, n)


def versions_of(choice: Completion) -> list[int]:
    assert choice.version_spans is not None
    return choice.version_spans[:, 2].tolist()


def error_of(trainer: Trainer, choice: Completion, prompt: list[int] = PROMPT) -> float:
    assert choice.version_spans is not None
    replayed = trainer.replay(prompt, choice.token_ids.tolist(), choice.version_spans.tolist())
    return (replayed - torch.from_numpy(choice.logprobs)).abs().max().item()


@pytest.fixture(scope="module")
def trainer(tiny_qwen2: Path) -> Trainer:
    return Trainer(tiny_qwen2)


@pytest.fixture
def sender(vllm_server: Any) -> Iterator[Senders]:
    senders = Senders(vllm_server, timeout_s=60, secret=vllm_server.secret)
    yield senders
    senders.sender.close()


def test_update_is_live_labelled_and_exact(vllm_server: Any, trainer: Trainer, sender: Senders) -> None:
    for version in (1, 2):
        trainer.next_version(version)
        trainer.send(sender, version)
        assert httpx.get(f"{vllm_server.job.url}/weight_info", timeout=60).json()["weight_version"] == str(version)
        (choice,) = generate(vllm_server.job.url, max_tokens=100)
        assert versions_of(choice) == [version]
        assert error_of(trainer, choice) <= TOLERANCE


def test_updates_under_load_abort_nothing_and_every_token_has_its_version(
    vllm_server: Any, trainer: Trainer, sender: Senders
) -> None:
    url = vllm_server.job.url
    version, most = 10, 0
    trainer.next_version(version)
    trainer.send(sender, version)
    prompts = [PROMPT[: 5 + 2 * index] for index in range(8)]
    while most < 3:
        with ThreadPoolExecutor(8) as pool:
            futures: list[Future[list[Completion]]] = [
                pool.submit(generate, url, max_tokens=400, prompt=prompt, n=2) for prompt in prompts
            ]
            for _ in range(50):
                if all(future.done() for future in futures):
                    break
                version += 1
                trainer.next_version(version)
                trainer.send(sender, version)
                time.sleep(0.1)  # spacing of the updates, not synchronisation
            results = [(prompt, choice) for prompt, f in zip(prompts, futures, strict=True) for choice in f.result()]
        assert len(results) == 16
        assert all(choice.finish_reason == "length" and len(choice.token_ids) == 400 for _, choice in results)
        assert max(error_of(trainer, choice, prompt) for prompt, choice in results) <= TOLERANCE
        most = max(len(versions_of(choice)) for _, choice in results)


@pytest.fixture
def checking_sender(vllm_server: Any) -> Iterator[Senders]:
    senders = Senders(vllm_server, timeout_s=60, secret=vllm_server.secret, probe_tolerance=1e-3)
    yield senders
    senders.sender.close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
    return value


def score(trainer: Trainer, text: ProbeText) -> "Future[np.ndarray]":
    ids = torch.from_numpy(text.token_ids).long()
    with torch.no_grad():
        logprobs = trainer.model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])
    scores: Future[np.ndarray] = Future()
    scores.set_result(logprobs.flatten().numpy())
    return scores


def test_server_is_verified_after_updates_and_is_given_up_after_two_misses(
    vllm_server: Any, trainer: Trainer, checking_sender: Senders
) -> None:
    senders, sender = checking_sender, checking_sender.sender
    text = until(lambda: sender.sample_text((4, 256), 256, 0, 1.0))
    sender.check_with(text)
    assert sender._checker is not None
    state = sender._checker._states["actor_llm_0"]
    for version in range(1000, 1003):
        trainer.next_version(version)
        trainer.send(senders, version, scores=score(trainer, text))
        until(lambda: not state.is_busy)
        assert (state.passed, state.is_scored) == (version, True)
    assert state.baseline is not None
    assert state.baseline.noise < 1e-3

    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[0] += 1e-7  # far below what log-probabilities show
    trainer.send(senders, 1003)
    until(lambda: state.passed == 1003)

    check = {"headers": {"Authorization": f"Bearer {vllm_server.secret}"}, "json": {"version": 1003}}
    answer = httpx.post(f"{vllm_server.job.url}/check_weights", **check, timeout=60).json()
    assert answer["is_checked"]
    assert (answer["differing"], answer["unlearned"]) == ([], [])

    other = Senders(vllm_server, timeout_s=60, secret=vllm_server.secret)
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[0] += 1e-7
    trainer.send(other, 1003)
    other.sender.close()
    sender._checker.start_check("actor_llm_0", 1003)
    (miss,) = until(lambda: misses_of(senders))
    assert "received other bytes" in miss.reason
    assert (miss.version, miss.since, miss.is_final) == (1003, 1004, False)
    assert sender.wait_live(1003, 60)
    until(lambda: not state.is_busy)
    assert len(misses_of(senders)) == 1

    wrong: Future[np.ndarray] = Future()
    wrong.set_result(score(trainer, text).result() + 0.5)
    trainer.next_version(1004)
    trainer.send(senders, 1004, scores=wrong)
    _, miss = until(lambda: misses_of(senders)[1:] and misses_of(senders))
    assert miss.is_final
    assert "nats" in miss.reason
    with pytest.raises(ServersExpelledError, match=says("weight probe", "twice")):
        until(sender.check)


def misses_of(senders: Senders) -> list[ProbeMissed]:
    return [message for message in senders.announced if isinstance(message, ProbeMissed)]


async def test_scores_of_given_tokens_equal_the_model(vllm_server: Any, trainer: Trainer, sender: Senders) -> None:
    trainer.next_version(2000)
    trainer.send(sender, 2000)
    generator = np.random.default_rng(0)
    async with aiohttp.ClientSession() as session:
        for length in (1, 2, 500):
            tokens = generator.integers(0, 256, size=length)
            ((scores, ids, best, _),) = await score_sequences(session, vllm_server.job.url, [tokens], num_top=5)
            assert scores.dtype == np.float32
            assert scores.shape == (length,)
            with torch.no_grad():
                logprobs = trainer.model(torch.tensor(tokens)[None]).logits[0].log_softmax(-1).numpy()
            expected = logprobs[np.arange(length - 1), tokens[1:]]
            np.testing.assert_allclose(scores[1:], expected, atol=TOLERANCE, rtol=0)
            assert ids is not None
            assert best is not None
            np.testing.assert_allclose(best[1:], -np.sort(-logprobs[:-1])[:, :5], atol=TOLERANCE, rtol=0)
            chosen = np.take_along_axis(logprobs[:-1], ids[1:], 1)
            np.testing.assert_allclose(best[1:], chosen, atol=TOLERANCE, rtol=0)
        with pytest.raises(ServerError) as refusal:
            await score_sequences(session, vllm_server.job.url, [np.zeros(5000, dtype=np.int64)])
    assert refusal.value.status == 400


CHILD = """
import sys, time
import torch
from transformers import AutoModelForCausalLM
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.world import Job
from tests.sender_kit import sender_settings
count = 0
def pace(num_bytes):
    global count
    count += 1
    if count == 3:
        print("half", flush=True)
        time.sleep(600)
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
job = Job(name="actor_llm_0", kind="actor_llm", url=sys.argv[1])
settings = sender_settings(timeout_s=6, secret=sys.argv[3])
sender = WeightSender(lambda: [job], settings, lambda message: None)
sender.origin.source_server._pace = pace
sender.wait_for_servers(1, 60)
zeros = {name: torch.zeros_like(param) for name, param in model.named_parameters()}
sender.send(99, zeros.items(), tuple(spec_of(*item) for item in zeros.items()))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_sender_that_dies_or_freezes_while_it_sends_leaves_old_weights_and_a_running_server(
    vllm_server: Any, trainer: Trainer, sender: Senders, tiny_qwen2: Path, number: signal.Signals
) -> None:
    url = vllm_server.job.url
    version = 3000 + number
    trainer.next_version(version)
    trainer.send(sender, version)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, url, str(tiny_qwen2), vllm_server.secret],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        (during,) = generate(url, max_tokens=50)
        os.kill(child.pid, number)
        deadline = time.monotonic() + 60
        while "event=weight_update_failed" not in vllm_server.log():
            assert time.monotonic() < deadline, "the server still waits for its sender"
            time.sleep(0.05)
        (after,) = generate(url, max_tokens=50)
        for choice in (during, after):
            assert versions_of(choice) == [version]
            assert error_of(trainer, choice) <= TOLERANCE
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    trainer.next_version(version + 100)
    trainer.send(sender, version + 100)
    (choice,) = generate(url, max_tokens=50)
    assert error_of(trainer, choice) <= TOLERANCE


def test_control_routes_need_the_secret(vllm_server: Any) -> None:
    with httpx.Client(base_url=vllm_server.job.url, timeout=60) as client:
        for path in ("/pause", "/resume", "/update_weights", "/collective_rpc", "/receive_weight_update", "/unknown"):
            assert client.post(path).status_code == 401, path
            assert client.post(path, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["id"] == "policy"
        headers = {"Authorization": f"Bearer {vllm_server.secret}"}
        assert client.post("/receive_weight_update", headers=headers).status_code == 422
        assert client.post("/pause", headers=headers).status_code == 404  # vLLM's development routes are off
    assert vllm_server.secret not in vllm_server.log()
