"""A real vLLM server that is sent the adapter alone: exact samples, versions in a sequence, proofs and bytes.

`test_shard_models.py` loads adapters into workers of vLLM's own models without a server.
"""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.adapter import adapter_parameters
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_specs
from pipelinerl.finetune.model import Policy, add_adapters
from pipelinerl.weights.base_files import base_digest
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.publish.servers import UpdateOutcome
from tests.integration.test_answers import BLOCK, ask
from tests.integration.test_server import TOLERANCE, Trainer, error_of, misses_of, score, until, versions_of
from tests.sender_kit import Senders
from tests.served import weight_check

PROMPT = [(7 * i) % 251 + 1 for i in range(2 * BLOCK + 5)]
OVERRIDES = ("finetune.lora.enabled=true", "finetune.lora.r=1", "finetune.lora.alpha=3")


class AdapterTrainer(Trainer):
    """Moves and sends the adapter alone."""

    def __init__(self, model_path: Path):
        super().__init__(model_path)
        required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "finetune.dtype=float32"]
        cfg = parse(compose("base", [*required, *OVERRIDES]))
        policy = Policy(add_adapters(self.model, cfg.finetune.lora, seed=0).eval(), lora_scaling=3.0)
        self.engine = ReplicatedEngine(policy, cfg, torch.device("cpu"))
        self._adapter = [parameter.detach().clone() for parameter in self.engine.trained.values()]
        self.versions = {0: copy.deepcopy(self.model.state_dict())}

    @torch.no_grad()
    def next_version(self, version: int) -> None:
        """Move A and B away from where they started, so that no stale one can go unnoticed."""
        for start, parameter in zip(self._adapter, self.engine.trained.values(), strict=True):
            parameter.copy_(start + torch.randn(start.shape, generator=self._generator) * 0.05)
        self.versions[version] = copy.deepcopy(self.model.state_dict())

    def push(self, senders: Senders, version: int, scores: Any = None) -> UpdateOutcome:
        """Returns when the version is live on the server."""
        weights = dict(adapter_parameters(self.engine, torch.float32))
        (outcome,) = senders.send(version, weights, scores=scores).values()
        assert outcome.error == ""
        assert senders.sender.wait_live(version, 60)
        return outcome


@pytest.fixture(scope="module")
def server(serving: Any, tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with serving.running(tmp_path_factory.mktemp("run"), tiny_qwen2, overrides=OVERRIDES) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapter_is_swapped_in_place_while_requests_generate(server: Any, tiny_qwen2: Path) -> None:
    """Samples, scores of vLLM's own route, and answers that see many versions are the trainer's at every token."""
    url, trainer, base = server.job.url, AdapterTrainer(tiny_qwen2), base_digest(str(tiny_qwen2))
    senders = Senders(server, timeout_s=60, secret=server.secret, probe_tolerance=1e-3, base=base)
    sender = senders.sender
    try:
        text = until(lambda: sender.sample_text((4, 256), 256, 0, 1.0))
        sender.check_with(text.with_scores(score(trainer, text).result()))
        assert sender._checker is not None
        state = sender._checker._states["actor_llm_0"]
        for version in (0, 1):
            if version:
                trainer.next_version(version)
            outcome = trainer.push(senders, version, scores=score(trainer, text))
            until(lambda: not state.is_busy)
            assert (state.passed, state.is_scored, misses_of(senders)) == (version, True, [])
            choices = ask(url, PROMPT, n=2)
            assert [versions_of(choice) for choice in choices] == [[version]] * 2
            assert sorted(choice.cached_tokens for choice in choices) == [0, 2 * BLOCK], "none of another version"
            assert max(error_of(trainer, choice, PROMPT) for choice in choices) <= TOLERANCE
        check = weight_check(server, 1)
        assert (check.is_checked, check.differing, check.unlearned, check.base) == (True, (), (), base)
        whole = Layout(tuple(exported_specs(trainer.engine, torch.float32))).num_bytes
        assert whole / outcome.num_bytes > 50

        version, choices = 1, []
        with ThreadPoolExecutor(1) as pool:  # as often as it takes until an answer has seen several versions
            while max((len(versions_of(choice)) for choice in choices), default=0) < 3:
                future = pool.submit(ask, url, PROMPT, n=2, max_tokens=300)
                while not future.done():
                    version += 1
                    trainer.next_version(version)
                    trainer.push(senders, version)
                choices = future.result()
        assert max(error_of(trainer, choice, PROMPT) for choice in choices) <= TOLERANCE
    finally:
        sender.close()
