"""Servers of two tensor-parallel workers: each stages its own shard, learned from vLLM's loaders, and samples right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.model import Policy
from pipelinerl.records.answers import ANSWER_PATH, Answer, AnswerRequest
from pipelinerl.streams.codec import Codec
from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.protocol import CHECK_PATH, WeightCheck, WeightCheckRequest
from tests.models import FAMILIES, make_family
from tests.sender_kit import Senders

pytestmark = pytest.mark.timeout(1200)
START_S = 600.0
"""Three processes import vLLM, two of them on cores that they share with the others."""
TOLERANCE = 5e-5
PROMPT = list(range(40, 60))


class Served(NamedTuple):
    server: Any
    engine: ReplicatedEngine


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def served(request: Any, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("parallel")
    lm = make_family(request.param)
    lm.save_pretrained(folder / "model")
    serving.save_byte_tokenizer(folder / "model")
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    engine = ReplicatedEngine(Policy(lm.eval()), cfg.finetune, torch.device("cpu"))
    overrides = ("++vllm_config.vllm_kwargs.tensor-parallel-size=2",)
    run, model = folder / "run", folder / "model"
    with serving.running(run, model, overrides=overrides, num_cores=2, start_s=START_S) as server:
        yield Served(server, engine)


@torch.no_grad()
def error_of(served: Served, version: int) -> float:
    """Largest difference between the log-probabilities of server and trainer."""
    sampling = {"n": 1, "max_tokens": 60, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    request = AnswerRequest(model="policy", token_ids=np.array(PROMPT, dtype=np.int32), sampling=sampling)
    body = Codec(AnswerRequest).encode(request)
    response = httpx.post(f"{served.server.job.url}{ANSWER_PATH}", content=body, timeout=120)
    response.raise_for_status()
    (completion,) = Codec(Answer).decode(response.content).completions
    if version:
        assert completion.version_spans is not None
        assert completion.version_spans[:, 2].tolist() == [version]
    ids = torch.tensor([PROMPT + completion.token_ids.tolist()])
    logprobs = served.engine.policy.lm(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    return (own - torch.from_numpy(completion.logprobs)).abs().max().item()


def checked(served: Served, version: int) -> WeightCheck:
    body = msgspec.json.encode(WeightCheckRequest(version=version))
    headers = {"Authorization": f"Bearer {served.server.secret}", "Content-Type": "application/json"}
    answer = httpx.post(f"{served.server.job.url}{CHECK_PATH}", content=body, headers=headers, timeout=60)
    return msgspec.json.decode(answer.content, type=WeightCheck)


def test_each_worker_stages_its_shard_of_whole_versions_and_of_differences(served: Served) -> None:
    server, engine = served
    senders = Senders(server, timeout_s=60, secret=server.secret, delta=True)
    try:
        assert error_of(served, 0) <= TOLERANCE
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in engine.policy.lm.parameters():
                    changed = parameter.view(-1)[version :: 1 if version == 1 else 50]
                    changed.add_(torch.randn_like(changed) * 0.03)
            weights = dict(exported_parameters(engine, torch.float32))
            layout = Layout(tuple(spec_of(*item) for item in weights.items()))
            (outcome,) = senders.send(version, weights).values()
            assert outcome.error == ""
            assert outcome.answer is not None
            assert outcome.answer.staged_bytes <= 0.56 * layout.num_bytes
            assert (outcome.num_bytes < layout.num_bytes / 4) == (version > 1), "differences after the first"
            assert error_of(served, version) <= TOLERANCE
            check = checked(served, version)
            assert (check.differing, check.unlearned) == ((), ())
            assert check.is_checked
    finally:
        senders.sender.close()
