"""`python -m pipelinerl.plan`, and the two benchmarks beside it, as people call them."""

import json
import re

import numpy as np
import pytest

from benchmarks import plan_scaling, plan_simulation
from pipelinerl.plan.__main__ import main


def plan(tmp_path, *arguments: str) -> dict:
    output = tmp_path / "plan.json"
    assert main([*arguments, "--json", str(output)]) == 0
    return json.loads(output.read_text())


def test_base_configuration_is_planned_without_a_download(tmp_path, capsys):
    result = plan(tmp_path, "--gpus", "8")
    assert result["rates"] == "assumed"
    assert 1 <= result["plan"]["generating"] <= 7
    assert result["plan"]["mean_rollout_lag"] <= 8  # max_lag_steps of base
    text = capsys.readouterr().out
    assert "Recommended" in text
    assert "Beside 8 device(s): " in text
    assert "Beside 1,000 devices: " in text


def test_bound_is_on_the_mean_unless_older_tokens_are_dropped(tmp_path):
    """8 sequences at least on each device, batches of 32. The longest is 3.3 times the mean, and lives for 4 steps."""
    given = ["--gpus", "8", "--decode", "8:100", "--decode", "64:800", "--train", "1000", "--batch-size", "32"]
    given += ["--max-length", "1000", "--max-lag", "1"]
    bounded = ["--override", "preprocess.lag_drop=rollout"]
    found = plan(tmp_path, *given)["plan"]
    assert found["mean_rollout_lag"] == found["generating"] * found["concurrency"] / 32 == 1
    assert found["largest_lag"] == 4
    assert plan(tmp_path, *given, *bounded)["plan"]["largest_lag"] == 1


def test_measured_rates_decide_the_split(tmp_path):
    # a device decodes 100 tokens/s with any batch and trains 100 tokens/s: half and half is best
    result = plan(
        tmp_path, "--gpus", "8", "--decode", "8:100", "--decode", "64:100", "--train", "100", "--max-length", "1000"
    )
    assert result["overrides"][:2] == ["world.actor_fraction=4", "world.finetune_fraction=4"]
    assert result["plan"]["rate"] == pytest.approx(400.0)


def test_servers_of_several_gpus_get_their_concurrency_together(tmp_path):
    result = plan(tmp_path, "--gpus", "8", "--gpus-per-llm", "2", "--decode", "16:100", "--train", "100")
    assert result["plan"]["generating"] % 2 == 0
    assert result["overrides"][2] == f"actor.llm_max_rollouts={2 * result['plan']['concurrency']}"


def test_split_is_another_name_of_the_command(tmp_path):
    output = tmp_path / "named.json"
    assert main(["split", "--gpus", "8", "--json", str(output)]) == 0
    assert json.loads(output.read_text()) == plan(tmp_path, "--gpus", "8")


def test_own_configuration_is_planned(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nworld: {gpus_per_node: 4}\nmax_lag_steps: 2\n")
    result = plan(tmp_path, "--config-dir", str(tmp_path), "--config-name", "mine")
    assert result["plan"]["mean_rollout_lag"] <= 2
    assert result["overrides"][0].startswith("world.actor_fraction=")


def test_recommendation_can_be_simulated(capsys):
    arguments = ["--gpus", "4", "--decode", "16:400", "--train", "200", "--max-length", "100", "--batch-size", "16"]
    assert plan_simulation.main(arguments) == 0
    share = re.search(r"\(([\d.]+)\s+of\s+the\s+formula\)", capsys.readouterr().out)
    assert share is not None
    assert float(share.group(1)) == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "1"], "share_devices=true"),
        (["--decode", "8:100"], "together"),
        (["--model", "no-such/model"], "is not on this machine"),
        (["--gpus", "8", "--batch-size", "1", "--max-lag", "0"], "respects a lag of 0"),
        (["--config-name", "quickstart"], "the run builds its model itself: give --model=FOLDER"),
        (["--config-name", "no-such"], "no-such"),
        (["--override", "no.such=1"], "no.such"),
    ],
)
def test_impossible_plans_are_refused_with_the_fix(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(option, "0") for option in ("--gpus", "--batch-size", "--mean-length", "--max-length", "--train")],
        *[("--gpus", "-8"), ("--train", "nan"), ("--train", "inf"), ("--decode", "8:-1"), ("--decode", "nan:100")],
    ],
)
def test_numbers_that_mean_nothing_are_refused_by_option(option, value, capsys):
    with pytest.raises(SystemExit) as refused:
        main([option, value])
    assert refused.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_scaling_of_a_file_of_points(tmp_path, capsys):
    compute = np.geomspace(10, 10_000, 12)
    reward = 0.2 + 0.4 / (1 + 300 / compute)
    source, output = tmp_path / "curve.json", tmp_path / "fit.json"
    source.write_text(json.dumps([[0, 0.2], *zip(compute.tolist(), reward.tolist(), strict=True)]))
    assert plan_scaling.main([str(source), "--json", str(output)]) == 0
    assert json.loads(output.read_text())["asymptote"] == pytest.approx(0.6, abs=0.005)
    assert "A = 0.60" in capsys.readouterr().out
