"""`pipelinerl resume RUN`: the settings of the run, but nothing that an earlier launch was to do to the folder."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.load import compose, to_container
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import program, resume
from tests.says import says


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """The configurations that were launched."""
    found: list[DictConfig] = []
    monkeypatch.setattr(program, "launch", lambda cfg, overrides: found.append(cfg) or 0)
    return found


def make_run(path: Path, *overrides: str) -> Path:
    required = ["dataset_loader=a.b", "actor.rollout_policy=a.b", f"output_dir={path}"]
    container: dict[str, Any] = to_container(compose("base", [*required, *overrides]))
    (path / "conf").mkdir(parents=True)
    (path / "conf" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(container)))
    return path


def test_run_that_was_started_over_is_not_deleted_when_it_goes_on(tmp_path: Path, launched: list[DictConfig]) -> None:
    """Its configuration says `force_restart`, and resuming it deleted checkpoints, exports and streams."""
    run = make_run(tmp_path / "run", "force_restart=true", "resume=checkpoint", "seed=7")
    assert resume.main([str(run), "finetune.max_train_steps=9"]) == 0
    (cfg,) = launched
    assert (cfg.force_restart, cfg.resume) == (False, "streams")
    assert (cfg.seed, cfg.finetune.max_train_steps) == (7, 9)


def test_what_is_said_now_is_done(tmp_path: Path, launched: list[DictConfig]) -> None:
    run = make_run(tmp_path / "run")
    resume.main([str(run), "resume=checkpoint", "force_restart=true"])
    assert (launched[0].force_restart, launched[0].resume) == (True, "checkpoint")
    with pytest.raises(ConfigError, match=says("`fource_restart`", "not a configuration key")):
        resume.go_on(run, ["fource_restart=true"])
