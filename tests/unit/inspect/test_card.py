"""The model card of an export: its step, the evaluations up to it, and settings from which the run is made again."""

from pathlib import Path

import yaml

from pipelinerl.config.load import parse
from pipelinerl.inspect.card import card, other_settings, write_cards
from pipelinerl.records import EvaluationDone
from tests.evidence import config

CFG = parse(
    config(
        "model_path=/models/Small", "attempts=16", "finetune.rl.kl_coef=0.01", "world.actor_fraction=1", "output_dir=/r"
    )
)
EVALUATIONS = [
    EvaluationDone(version=version, success=version / 100, reward=0.5, num_rollouts=64, metrics={})
    for version in (20, 0, 40)
]


def test_card_has_the_evaluations_up_to_its_step_and_no_path_of_the_machine_in_its_name() -> None:
    text = card(CFG, 20, EVALUATIONS, {"torch": "2.13.0"})
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "Small"
    assert "# Small, 20 optimizer steps of PipelineRL" in text
    assert [line for line in text.splitlines() if line.endswith("| 64 |")] == [
        "| 0 | 0.000 | 0.500 | 64 |",
        "| 20 | 0.200 | 0.500 | 64 |",
    ]
    assert text.endswith("Made with torch 2.13.0.\n")
    assert "It was not evaluated" in card(CFG, 20, [], {})


def test_settings_are_those_that_differ_and_not_of_the_machine() -> None:
    settings = other_settings(CFG)
    assert settings["attempts"] == 16
    assert settings["finetune"]["rl"] == {"kl_coef": 0.01}
    assert not {"world", "output_dir", "max_lag_steps"} & set(settings)


def test_every_export_gets_a_card(tmp_path: Path) -> None:
    for name in ("step_20", "step_40", "step_60.writing"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    write_cards(tmp_path, CFG, EVALUATIONS)
    assert sorted(path.parent.name for path in tmp_path.rglob("README.md")) == ["step_20", "step_40"]
