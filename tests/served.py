"""A trainer's model on a real server, and what tests ask of that: completions, and whether it holds its weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy
from pipelinerl.records.answers import ANSWER_PATH, Answer, AnswerRequest, Completion
from pipelinerl.streams.codec import Codec
from pipelinerl.weights.protocol import CHECK_PATH, WeightCheck, WeightCheckRequest


class Served(NamedTuple):
    """A server, and the trainer's engine with the same weights."""

    server: Any
    engine: ReplicatedEngine


def engine_of(lm: Any, model: Path, serving: Any) -> ReplicatedEngine:
    """The trainer's engine of ``lm``, which is also saved with a tokenizer in folder ``model`` for the server."""
    lm.save_pretrained(model)
    serving.save_byte_tokenizer(model)
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    return ReplicatedEngine(Policy(lm.eval()), cfg, torch.device("cpu"))


def sample(url: str, prompt: Sequence[int], max_tokens: int, n: int = 1) -> list[Completion]:
    """Completions of exactly ``max_tokens`` tokens."""
    sampling = {"n": n, "max_tokens": max_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    request = AnswerRequest(model="policy", token_ids=np.array(prompt, dtype=np.int32), sampling=sampling)
    response = httpx.post(f"{url}{ANSWER_PATH}", content=Codec(AnswerRequest).encode(request), timeout=120)
    response.raise_for_status()
    return list(Codec(Answer).decode(response.content).completions)


@torch.no_grad()
def largest_error(lm: Any, prompt: Sequence[int], completion: Completion) -> float:
    """Largest difference of the completion's log-probabilities from those of ``lm``."""
    ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
    logprobs = lm(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return (own - torch.from_numpy(completion.logprobs)).abs().max().item()


def weight_check(server: Any, version: int) -> WeightCheck:
    """The server's own comparison of its live tensors with what it was sent."""
    body = msgspec.json.encode(WeightCheckRequest(version=version))
    headers = {"Authorization": f"Bearer {server.secret}", "Content-Type": "application/json"}
    answer = httpx.post(f"{server.job.url}{CHECK_PATH}", content=body, headers=headers, timeout=60)
    return msgspec.json.decode(answer.content, type=WeightCheck)
