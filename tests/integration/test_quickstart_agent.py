"""An unmodified agent of the official OpenAI client (streaming, with a tool) learns: `examples/largest_agent`.

Its tokens are compared with the server's in ``test_agents_vllm.py``; here the trainer's own log-probabilities of all
tokens of the first step agree with those that the server reported.
"""

from pathlib import Path

import pytest

from pipelinerl.inspect.ledger import read_ledger
from pipelinerl.observability.metrics import read_metrics
from tests.launches import run_experiment

RUN_TIMEOUT_S = 600


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_agent_of_the_openai_client_learns(tmp_path: Path):
    run_dir = tmp_path / "run"
    summary = run_experiment("quickstart_agent", run_dir, timeout_s=RUN_TIMEOUT_S)
    assert summary["success_before"] <= 0.40
    assert summary["success_after"] >= 0.68
    assert summary["aborted_requests"] == 0
    first = next(point for point in read_metrics(run_dir, "finetune") if point["step"] == 1)
    assert first["lag_max"] == 0
    assert first["logratio_abs_max"] <= 2e-5
    ledger = read_ledger(run_dir)
    assert ledger.violations == ()
    assert ledger.counts()["trained"] == 160 * 64
