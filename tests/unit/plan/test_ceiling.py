"""Processes and bytes that a world needs, by hand."""

import json
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.plan import ceiling

ROOT = Path(__file__).resolve().parents[3]


def test_costs_are_those_that_the_benchmark_recorded() -> None:
    recorded = json.loads((ROOT / "benchmarks" / "ceiling.json").read_text())["cpu_ms_per_rollout"]
    assert {str(length): dict(row) for length, row in ceiling.CPU_MS.items()} == recorded


def test_cost_is_linear_between_lengths_and_proportional_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {1000: {"worker": 2.0, "check": 3.0}, 2000: {"worker": 4.0, "check": 3.0}}
    monkeypatch.setattr(ceiling, "CPU_MS", costs)
    assert [ceiling.cost_ms("worker", tokens) for tokens in (10, 1000, 1500, 2000, 4000)] == [2, 2, 3, 4, 8]
    assert ceiling.cost_ms("check", 4000) == 3


def test_needs_are_whole_processes_at_seven_tenths_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """700,000 tokens/s of 1,000 are 700 rollouts/s: 2 ms each is 1.4 cores, two processes at .7."""
    row = {"worker": 2.0, "server": 1.0, "actor": 0.1, "preprocessor": 1.5, "check": 4.0}
    monkeypatch.setattr(ceiling, "CPU_MS", {1000: row})
    wanted = ceiling.needs(700_000, 1000, 500)
    assert (wanted.rollouts_per_s, wanted.workers, wanted.replicas) == (700, 2, 2)
    assert (wanted.verifier_processes, wanted.api_cores) == (4, 1)
    assert wanted.stream_mb_per_s == pytest.approx(700 * 1500 * 24 / 1e6)


def test_shortages_name_the_key_and_what_to_set() -> None:
    required = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
    cfg = parse(compose("base", [*required, "actor.rollout_workers=1", "world.replicas=1", "verifier.workers=2"]))
    wanted = ceiling.Needs(
        rollouts_per_s=2000, workers=9, replicas=2, verifier_processes=5, api_cores=3, stream_mb_per_s=1
    )
    assert ceiling.shortages(wanted, cfg) == [
        "world.replicas=1 is short for 2,000 rollouts/s: set world.replicas=2",
        "actor.rollout_workers=1 is short for 2,000 rollouts/s: set actor.rollout_workers=5",
        "world.verifier_replicas=1 is short for 2,000 rollouts/s: set world.verifier_replicas=3",
    ]
    enough = ceiling.Needs(
        rollouts_per_s=10, workers=1, replicas=1, verifier_processes=1, api_cores=1, stream_mb_per_s=1
    )
    assert ceiling.shortages(enough, cfg) == []


def test_lines_are_those_of_the_devices_and_of_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 devices at 4,000 tokens/s are 4 rollouts/s of 1,000 tokens, 1,000 devices 500: one core and 1.43 by .7."""
    row = {"worker": 2.0, "server": 1.0, "actor": 0.1, "preprocessor": 1.5, "check": 4.0}
    monkeypatch.setattr(ceiling, "CPU_MS", {1000: row})
    required = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
    here, large = ceiling.lines(parse(compose("base", required)), 4000, 8, 1000, 500)
    assert here.startswith("Beside 8 device(s): 4.0 rollouts/s need 1 rollout worker(s), 1 actor(s)")
    assert large.startswith("Beside 1,000 devices: 500.0 rollouts/s need 2 rollout worker(s), 2 actor(s)")
    assert "3 verifier process(es), 1 core(s)" in large
    few = parse(compose("base", [*required, "world.replicas=1"]))
    [_, _, warning, *_] = ceiling.lines(few, 4000 * 125, 8, 1000, 500)
    assert warning == "warning: world.replicas=1 is short for 500 rollouts/s: set world.replicas=2"
