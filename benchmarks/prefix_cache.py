"""Prompt tokens that a server computes for multi-turn rollouts, by `vllm_config.prefix_caching`.

    python -m benchmarks.prefix_cache --json benchmarks/prefix_cache.json

A real server of a random 1M-parameter model in float32. Two groups of eight rollouts play 13 turns side by side; every
turn continues the tokens of the last one. Once with the same weights, once with updates after the 4th and the 8th
turn, each moving every weight by ± ``STEP`` as an Adam step does. `prefilled` is what was sent less what was found.
`parity_nats` is the largest difference of the answers' log-probabilities to the same model in Hugging Face, all of a
sequence computed by the version that sampled the token; `kl_nats` the mean of that difference's k3 estimator.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from benchmarks.provenance import machine
from pipelinerl.records.answers import ANSWER_PATH, Answer, AnswerRequest, Completion
from pipelinerl.streams.codec import Codec
from tests.integration.conftest import build_model, running_server
from tests.integration.test_server import Trainer
from tests.sender_kit import Senders

TURNS, GROUPS, ATTEMPTS = 13, 2, 8
PROMPT, COMPLETION, REPLY = 300, 50, 14
STEP = 1e-3
UPDATES = {4: 2, 8: 3}
"""Version that is sent after a turn."""


class Rollout:
    """The tokens of one conversation, and what was sampled in it."""

    def __init__(self, prompt: list[int]):
        self.token_ids = list(prompt)
        self.first_version: int | None = None
        self.turns: list[tuple[int, Completion]] = []

    def add_completion(self, completion: Completion, rng: np.random.Generator) -> None:
        assert completion.version_spans is not None
        self.turns.append((len(self.token_ids), completion))
        if self.first_version is None:
            self.first_version = int(completion.version_spans[0, 2])
        self.token_ids += [*completion.token_ids.tolist(), *rng.integers(1, 250, REPLY).tolist()]


async def ask(client: httpx.AsyncClient, url: str, rollout: Rollout) -> Completion:
    sampling = {"max_tokens": COMPLETION, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    request = AnswerRequest(
        token_ids=np.array(rollout.token_ids, np.int32),
        model="policy",
        sampling=sampling,
        prefix_version=rollout.first_version,
    )
    response = await client.post(url + ANSWER_PATH, content=Codec(AnswerRequest).encode(request))
    response.raise_for_status()
    return Codec(Answer).decode(response.content).completions[0]


@torch.no_grad()
def differences(trainer: Trainer, rollouts: list[Rollout]) -> np.ndarray:
    """Hugging Face's log-probabilities less the server's, of every token that one version sampled."""
    found = []
    for version, weights in trainer.versions.items():
        trainer.model.load_state_dict(weights)
        for rollout in rollouts:
            logits = trainer.model(torch.tensor([rollout.token_ids])).logits[0].log_softmax(-1)
            for start, completion in rollout.turns:
                spans, ids = completion.version_spans, torch.from_numpy(completion.token_ids).long()
                if spans is None or spans[:, 2].tolist() != [version]:
                    continue
                expected = logits[start - 1 : start - 1 + len(ids)].gather(1, ids[:, None])[:, 0]
                found.append(expected.numpy() - completion.logprobs)
    return np.concatenate(found)


def step(trainer: Trainer, version: int) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(torch.sign(torch.randn_like(parameter)), alpha=STEP)
    trainer.versions[version] = {name: value.clone() for name, value in trainer.model.state_dict().items()}


async def play(server: Any, trainer: Trainer, senders: Senders, version: int, *, updates: bool) -> dict[str, float]:
    rng, sent, cached = np.random.default_rng(version), 0, 0
    prompts = [rng.integers(1, 250, PROMPT).tolist() for _ in range(GROUPS)]
    rollouts = [Rollout(prompts[i % GROUPS]) for i in range(GROUPS * ATTEMPTS)]
    trainer.versions.clear()
    step(trainer, version)
    trainer.send(senders, version)
    started = time.perf_counter()
    async with httpx.AsyncClient(timeout=300) as client:
        for turn in range(1, TURNS + 1):
            completions = await asyncio.gather(*(ask(client, server.job.url, rollout) for rollout in rollouts))
            sent += sum(len(rollout.token_ids) for rollout in rollouts)
            cached += sum(completion.cached_tokens for completion in completions)
            for rollout, completion in zip(rollouts, completions, strict=True):
                rollout.add_completion(completion, rng)
            if updates and turn in UPDATES:
                trainer.model.load_state_dict(trainer.versions[max(trainer.versions)])
                step(trainer, version + UPDATES[turn])
                await asyncio.to_thread(trainer.send, senders, version + UPDATES[turn])
    seconds = time.perf_counter() - started
    difference = differences(trainer, rollouts)
    return {
        "sent": sent,
        "prefilled": sent - cached,
        "times_fewer": round(sent / (sent - cached), 2),
        "seconds": round(seconds, 1),
        "parity_nats": float(np.abs(difference).max()),
        "kl_nats": float((np.expm1(difference) - difference).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--policies", nargs="+", default=["version", "conversation", "off"])
    args = parser.parse_args()
    document: dict[str, Any] = {
        "machine": machine(),
        "turns": TURNS,
        "rollouts": GROUPS * ATTEMPTS,
        "step": STEP,
    }
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model")
        for policy in args.policies:
            run_dir = Path(folder) / policy
            run_dir.mkdir()
            with running_server(run_dir, model, overrides=(f"vllm_config.prefix_caching={policy}",)) as server:
                trainer, senders = Trainer(model), Senders(server, timeout_s=60, secret=server.secret)
                try:
                    document[policy] = {
                        "one_version": asyncio.run(play(server, trainer, senders, 1, updates=False)),
                        "two_updates": asyncio.run(play(server, trainer, senders, 10, updates=True)),
                    }
                finally:
                    senders.sender.close()
            print(policy, document[policy], flush=True)
            if args.json:
                args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
