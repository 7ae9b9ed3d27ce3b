"""Ledger, report and status of long runs: many groups, 2,000 weight versions, 64 servers."""

import tracemalloc
from pathlib import Path

import pytest

from pipelinerl.config.load import load_old_run
from pipelinerl.inspect import ledger, report, status
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.observability.status import STATUS_DIR, StatusRecord, write_status
from pipelinerl.records import (
    EvaluationDone,
    PreprocessorProgress,
    SamplesProcessed,
    TrainerMessage,
    WeightUpdateSuccess,
    topics,
)
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.run_folder import write_config
from tests.sizes.kit import SIZES, sized_group, write_groups

FAST = [(1, 64), (8000, 64)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_config(tmp_path)
    set_streams_backend("files")
    return tmp_path


def write_progress(run_dir: Path, groups: int, attempts: int, per_step: int) -> None:
    """All rollouts packed in order, ``per_step`` groups for a step."""
    with open_writer(SingleStreamSpec(run_dir, topics.PREPROCESSOR), PreprocessorProgress) as writer:
        for step in range(groups // per_step):
            first, end = step * per_step, (step + 1) * per_step
            writer.write(
                PreprocessorProgress(
                    samples_packed=end * attempts,
                    samples_dropped=0,
                    dropped_by_reason={},
                    step=step + 1,
                    source=(end, 0),
                    counted_until=(end - 1, attempts),
                    packed_sample_ids=tuple(f"0-{i}/{a}" for i in range(first, end) for a in range(attempts)),
                )
            )


def write_training(run_dir: Path, steps: int, servers: int, batch: int) -> None:
    names = tuple(f"actor_llm_{i}" for i in range(servers))
    with open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as writer:
        writer.write(WeightUpdateSuccess(version=0, servers=names, timestamp=1.0))
        for step in range(1, steps + 1):
            metrics = {"reward": 0.5, "tokens": 100.0, "lag_mean": 1.0, "lag_max": 2.0}
            writer.write(
                SamplesProcessed(samples_processed=batch * step, step=step, metrics=metrics, timestamp=1.0 + step)
            )
            writer.write(
                WeightUpdateSuccess(version=step, servers=names, pause_ms=(5.0,) * servers, timestamp=1.5 + step)
            )


@pytest.mark.parametrize(("groups", "steps"), [(4000, 2000), pytest.param(100_000, 2000, marks=pytest.mark.slow)])
def test_run_of_many_groups_and_two_thousand_versions_is_accounted_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str], groups: int, steps: int
) -> None:
    write_groups(run_dir, (sized_group(i, 2, 4) for i in range(groups)))
    write_progress(run_dir, groups, 2, groups // steps)
    write_training(run_dir, steps, 64, 2 * groups // steps)
    with open_writer(SingleStreamSpec(run_dir, topics.EVALUATION), EvaluationMessage) as writer:
        for version in range(0, steps, 10):
            writer.write(
                EvaluationDone(
                    version=version, success=0.5, reward=0.5, num_rollouts=8, metrics={}, timestamp=float(version)
                )
            )
    for i in range(64):
        (run_dir / STATUS_DIR).mkdir(exist_ok=True)
        write_status(run_dir / STATUS_DIR / f"actor_llm_{i}.json", running(f"actor_llm_{i}"))

    assert ledger.show(run_dir, as_json=False) == 0
    assert capsys.readouterr().out.split() == [str(2 * groups), "trained"]
    summary = report.write_report(run_dir, load_old_run(run_dir), launched=0.0, started=1.0)
    assert (summary["optimizer_steps"], summary["weight_updates"], summary["rollouts"]) == (steps, steps, 2 * groups)
    assert summary["pause_ms"]["mean"] == 5.0
    assert status.main([str(run_dir)]) == 0
    screen = capsys.readouterr().out
    assert f"trained   step {steps}, {2 * groups} rollouts, lag 1.0 (max 2)" in screen
    assert "actor_llm_63" in screen
    assert read_metrics(run_dir, "actor") == []


def running(job: str) -> StatusRecord:
    return StatusRecord(
        job=job,
        state="running",
        pid=1,
        hostname="h",
        started=0.0,
        heartbeat=0.0,
        progress_at=0.0,
        progress_count=1,
        waits=(),
        fields={},
    )


@pytest.mark.parametrize(
    ("length", "attempts"), [pytest.param(*s, marks=[] if s in FAST else pytest.mark.slow) for s in SIZES]
)
def test_ledger_and_report_of_long_rollouts_hold_few_of_them_in_memory(
    run_dir: Path, length: int, attempts: int
) -> None:
    groups = 24
    group_bytes = 8 * length * attempts
    write_groups(run_dir, (sized_group(i, attempts, length) for i in range(groups)))
    write_progress(run_dir, groups, attempts, 1)
    write_training(run_dir, groups, 1, attempts)
    tracemalloc.start()
    try:
        found = ledger.read_ledger(run_dir)
        totals = report.read_records(run_dir).rollouts
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.counts() == {"trained": groups * attempts}
    assert (totals.rollouts, totals.tokens) == (groups * attempts, groups * attempts * length)
    assert peak < 3 * group_bytes + 14 * 2**20
