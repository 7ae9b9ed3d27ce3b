"""Servers of two tensor-parallel workers: each stages its own shard, learned from vLLM's loaders, and samples right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.finetune.export import exported_parameters
from pipelinerl.weights.layout import Layout, spec_of
from tests.models import FAMILIES, make_family
from tests.sender_kit import Senders
from tests.served import Served, engine_of, largest_error, sample, weight_check

pytestmark = pytest.mark.timeout(1200)
START_S = 600.0
"""Three processes import vLLM, two of them on cores that they share with the others."""
TOLERANCE = 5e-5
PROMPT = list(range(40, 60))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def served(request: Any, serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("parallel")
    lm = make_family(request.param)
    engine = engine_of(lm, folder / "model", serving)
    overrides = ("++vllm_config.vllm_kwargs.tensor-parallel-size=2",)
    run, model = folder / "run", folder / "model"
    with serving.running(run, model, overrides=overrides, num_cores=2, start_s=START_S) as server:
        yield Served(server, engine)


def error_of(served: Served, version: int) -> float:
    """Largest difference between the log-probabilities of server and trainer."""
    (completion,) = sample(served.server.job.url, PROMPT, 60)
    if version:
        assert completion.version_spans is not None
        assert completion.version_spans[:, 2].tolist() == [version]
    return largest_error(served.engine.policy.lm, PROMPT, completion)


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
            check = weight_check(server, version)
            assert (check.differing, check.unlearned) == ((), ())
            assert check.is_checked
    finally:
        senders.sender.close()
