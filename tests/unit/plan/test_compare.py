"""Prediction beside measurement, from metrics with known rates."""

import json

import pytest

from pipelinerl.config import load
from pipelinerl.plan.__main__ import main
from pipelinerl.plan.compare import RunFacts, compare_prediction, predict
from pipelinerl.world import Cluster, Node, map_world

FACTS = RunFacts(
    batch_size=10,
    generation_tokens_per_s=2000.0,
    latency_s=2.0,
    train_tokens_per_s=4000.0,
    mean_tokens=100.0,
    longest_tokens=300.0,
    mean_square_tokens=15000.0,
)


def test_prediction_by_hand():
    # the servers' 2000 tokens/s are less than training: 2 optimizer steps per second
    prediction = predict(FACTS)
    assert (prediction.generation_rate, prediction.rate, prediction.trainer_waits) == (2000.0, 2000.0, 0.5)
    # 300 tokens take 6 s: 12 steps; a token has 75 tokens after it on average: 1.5 s, 3 steps
    assert prediction.largest_in_flight_lag == pytest.approx(12.0)
    assert prediction.mean_in_flight_lag == pytest.approx(3.0)


def test_trainer_limited_prediction_by_hand():
    prediction = predict(FACTS.__class__(**{**_fields(FACTS), "train_tokens_per_s": 1000.0}))
    assert (prediction.rate, prediction.trainer_waits) == (1000.0, 0.0)
    assert prediction.largest_in_flight_lag == pytest.approx(6.0)


def _fields(facts: RunFacts) -> dict:
    return {name: getattr(facts, name) for name in facts.__struct_fields__}


def make_steps(count: int = 11) -> list[dict]:
    """Steps of 1000 tokens, two per second, the trainer waiting for half of the time."""
    return [
        {
            "step": i + 1,
            "time": 100 + 0.5 * i,
            "tokens": 1000.0,
            "step_s": 0.2,
            "push_wait_s": 0.05,
            "wait_s": 0.25,
            "lag_in_flight_mean": 3.0,
            "lag_max": 14.0,
        }
        for i in range(count)
    ]


def test_comparison_lines_by_hand():
    _, lines = compare_prediction(FACTS, make_steps())
    assert {line.name.split(" (")[0]: line.ratio for line in lines} == {
        "trained tokens/s": pytest.approx(1.0),
        "trainer waits for data": pytest.approx(1.0),
        "mean in-flight lag": pytest.approx(1.0),
        "largest lag": pytest.approx(14 / 12),
    }


@pytest.fixture
def run_dir(tmp_path):
    from omegaconf import OmegaConf

    dictconfig = load.compose(
        "base",
        [
            f"output_dir={tmp_path}",
            "actor.rollout_policy=a.b",
            "dataset_loader=a.b",
            "actor.llm_max_rollouts=20",
            "max_lag_steps=3",
            "finetune.gradient_accumulation_passes=10",
        ],
    )
    (tmp_path / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(load.to_container(dictconfig)), tmp_path / "conf" / "config.yaml")
    cluster = Cluster(accelerator="cuda", nodes=(Node(rank=0, hostname="127.0.0.1", devices=8),))
    map_world(load.load_run(tmp_path), cluster, check=False).save(tmp_path)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "finetune.jsonl").write_text("".join(json.dumps(p) + "\n" for p in make_steps()))
    # an earlier process of the actor, whose totals end there; then 6000 tokens in 3 s of generation
    tokens, busy = (90000, 1000, 7000), (70.0, 6.0, 9.0)
    actor = [
        {
            "step": i,
            "time": time,
            "latency_s": 2.0,
            "output_tokens": 100.0,
            "output_tokens_max": 300.0,
            "tokens_generated": tokens[i],
            "generating_s": busy[i],
        }
        for i, time in enumerate((100.5, 101.0, 104.9))
    ]
    (tmp_path / "metrics" / "actor.jsonl").write_text("".join(json.dumps(point) + "\n" for point in actor))
    return tmp_path


def test_run_folder_is_compared(run_dir, capsys):
    output = run_dir / "plan.json"
    assert main(["compare", str(run_dir), "--json", str(output)]) == 0
    result = json.loads(output.read_text())
    assert result["facts"]["generation_tokens_per_s"] == pytest.approx(2000.0)
    # half of the time the trainer waits; pushes and what lies between two steps are its work
    assert result["facts"]["train_tokens_per_s"] == pytest.approx(4000.0)
    assert result["lines"][0]["predicted"] == pytest.approx(2000.0)
    assert result["lines"][0]["measured"] == pytest.approx(2000.0)
    assert "generation is the narrow side" in capsys.readouterr().out


def test_run_without_enough_steps_is_refused(run_dir, capsys):
    (run_dir / "metrics" / "finetune.jsonl").write_text("")
    assert main(["compare", str(run_dir)]) == 2
    assert "too few metrics" in capsys.readouterr().err
