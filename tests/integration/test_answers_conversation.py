"""A real vLLM server with `vllm_config.prefix_caching=conversation`: histories outlive updates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.records.answers import Completion
from tests.integration.test_answers import BLOCK, PROMPT, Run, ask
from tests.integration.test_server import TOLERANCE, Trainer, error_of


@pytest.fixture(scope="module")
def keeping_server(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path, serving: Any) -> Iterator[Any]:
    overrides = ("vllm_config.prefix_caching=conversation",)
    with serving.running(tmp_path_factory.mktemp("keep"), tiny_qwen2, overrides=overrides) as server:
        yield server


def test_policy_conversation_keeps_a_rollouts_history_over_an_update(keeping_server: Any, tiny_qwen2: Path) -> None:
    run = Run(keeping_server, tiny_qwen2)
    try:
        run.update(1)
        (first,) = ask(run.url, PROMPT, max_tokens=BLOCK)
        history = PROMPT + first.token_ids.tolist() + [9, 8, 7]
        run.update(2)
        (fresh,) = ask(run.url, PROMPT)
        (kept,) = ask(run.url, history, prefix_version=1)
        assert fresh.cached_tokens == 0, "a new conversation starts from the new weights"
        assert kept.cached_tokens == (len(PROMPT) + BLOCK - 1) // BLOCK * BLOCK
        assert error_of(run.trainer, fresh, PROMPT) <= TOLERANCE
        assert replay_kept(run.trainer, PROMPT, first, history, kept) <= TOLERANCE
    finally:
        run.senders.sender.close()


@torch.no_grad()
def replay_kept(trainer: Trainer, prompt: list[int], first: Completion, history: list[int], kept: Completion) -> float:
    """Largest difference of ``kept`` to the model, its cached beginning by version 1 and the rest by version 2."""
    trainer.model.load_state_dict(trainer.versions[1])
    cache = trainer.model(torch.tensor([history[: kept.cached_tokens]]), use_cache=True).past_key_values
    trainer.model.load_state_dict(trainer.versions[2])
    tokens = kept.token_ids.tolist()
    output = trainer.model(torch.tensor([(history + tokens)[kept.cached_tokens : -1]]), past_key_values=cache)
    logprobs = output.logits[0, -len(tokens) :].log_softmax(-1)
    sampled = logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert kept.logprobs is not None
    return (sampled - torch.from_numpy(kept.logprobs)).abs().max().item()
