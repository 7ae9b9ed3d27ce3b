"""A real vLLM server that averages what it is sent: it scores as the averaged model does, after a crash too."""

import asyncio
import copy
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from pipelinerl.preprocess.reference import Scores, score_sequences
from tests.sender_kit import Senders, wait_for

TOLERANCE = 2e-5
DECAY = 0.8
TOKENS = np.random.default_rng(0).integers(1, 255, 60).astype(np.int32)
OVERRIDES = (
    f"teachers=[{{ema: {DECAY}}}]",
    "finetune.rl.teacher_coef=1",
    "world.preprocessor_fraction=1",
    "finetune.save_checkpoint_steps=2",
)


def scores(server: Any) -> Scores:
    async def ask() -> Scores:
        headers = {"Authorization": f"Bearer {server.secret}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            (found,) = await score_sequences(session, server.job.url, [TOKENS])
            return found

    return asyncio.run(ask())


class Policy:
    """The policy's weights of each version, and a model that computes with any weights."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._start = copy.deepcopy(dict(self.model.named_parameters()))

    def version(self, number: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(number)
        return {
            name: (start + 0.03 * number * torch.randn(start.shape, generator=made)).detach()
            for name, start in self._start.items()
        }

    @torch.no_grad()
    def logprobs(self, weights: dict[str, torch.Tensor]) -> np.ndarray:
        for name, param in self.model.named_parameters():
            param.copy_(weights[name])
        ids = torch.from_numpy(TOKENS).long()
        logprobs = self.model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, ids[1:, None])[:, 0].numpy()

    def average(self, numbers: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """In float64, over the versions that were taken."""
        values = {name: weight.double() for name, weight in self.version(numbers[0]).items()}
        for before, number in pairwise(numbers):
            share = DECAY ** (number - before)
            for name, weight in self.version(number).items():
                values[name] = share * values[name] + (1 - share) * weight.double()
        return values


@pytest.mark.slow
def test_server_scores_as_the_average_of_its_versions_and_goes_on_after_a_crash(
    serving: Any, tiny_qwen2: Path, tmp_path: Path
) -> None:
    """Versions 2, 6 and 7 are never sent. A server that is killed at version 5 goes on from the file of version 4.

    The sender then sends it version 5 again.
    """
    policy = Policy(tiny_qwen2)

    def send(senders: Senders, number: int) -> None:
        (outcome,) = senders.send(number, policy.version(number)).values()
        assert outcome.error == ""

    def check(server: Any, taken: tuple[int, ...]) -> None:
        found = scores(server)
        assert found.version == taken[-1]
        np.testing.assert_allclose(found.logprobs_T[1:], policy.logprobs(policy.average(taken)), atol=TOLERANCE)

    with serving.own_cores() as cores:
        job = serving.write_run(tmp_path, tiny_qwen2, cores, kind="preprocessor_llm", overrides=OVERRIDES)
        server = serving.start(tmp_path, job)
        senders = None
        try:
            serving.wait_until_up(server)
            assert scores(server).version is None, "it holds the model's file"
            senders = Senders(server, timeout_s=60, secret=server.secret, probe_tolerance=1e-3)
            for number, taken in ((0, (0,)), (1, (0, 1)), (3, (0, 1, 3)), (4, (0, 1, 3, 4)), (5, (0, 1, 3, 4, 5))):
                send(senders, number)
                check(server, taken)
            moved = np.abs(policy.logprobs(policy.average((0, 1, 3, 4, 5))) - policy.logprobs(policy.version(5)))
            assert moved.max() > 0.01, "the policy is not its average"
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            server = serving.start(tmp_path, job, server.secret)
            serving.wait_until_up(server)
            wait_for(lambda: scores(server).version == 5)
            check(server, (0, 1, 3, 4, 5))
            send(senders, 8)
            check(server, (0, 1, 3, 4, 5, 8))
            assert senders.announced == [], "actors must not know it"
        finally:
            if senders is not None:
                senders.sender.close()
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
