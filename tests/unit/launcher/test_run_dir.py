"""Whose run folder it is, what may change in it, and what is deleted."""

import json
import stat
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose, to_container
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import run_dir
from tests.says import says

REQUIRED = ["dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


@pytest.fixture
def container(tmp_path: Path) -> dict:
    return to_container(compose("base", [*REQUIRED, f"output_dir={tmp_path / 'run'}"]))


def hold_run(path: Path, container: dict) -> None:
    """What a run leaves, as far as it matters here."""
    (path / "conf").mkdir(parents=True)
    (path / "conf" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(container)))
    (path / "streams" / "actor").mkdir(parents=True)
    (path / "actor_0").mkdir()
    (path / "actor_0" / "start.sh").touch()


def test_claim_new_folder_is_private_and_not_resumed(container: dict, tmp_path: Path) -> None:
    claim = run_dir.claim(tmp_path / "run", container, force_restart=False)
    with claim.lock:
        assert not claim.resumed
        assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_claim_same_experiment_resumes(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    with run_dir.claim(tmp_path / "run", container, force_restart=False).lock as lock:
        assert not lock.closed
    assert (tmp_path / "run" / "streams" / "actor").is_dir()


def test_what_launchers_of_other_nodes_have_left_is_the_runs(container: dict, tmp_path: Path) -> None:
    """It stayed when a run was deleted, and then the folder was refused as that of somebody else."""
    path = tmp_path / "run"
    hold_run(path, container)
    names = ("launcher.12.log", "launcher.12.log.1", "launcher.log.1", ".launch-0a1b2c")
    left = [path / name for name in names]
    for file in left:
        file.touch()
    run_dir.claim(path, container, force_restart=True).lock.close()
    assert not any(file.exists() for file in left)
    left[0].touch()
    run_dir.claim(path, container, force_restart=False).lock.close()


def test_folder_of_a_finished_run_is_known_to_nodes_that_do_not_claim_it(container: dict, tmp_path: Path) -> None:
    path, steps = tmp_path / "run", container["finetune"]["max_train_steps"]

    def is_finished(force_restart: bool = False, **changes: object) -> bool:
        return run_dir.holds_finished(path, container | changes, force_restart=force_restart)

    assert not is_finished()
    hold_run(path, container)
    assert not is_finished()
    (path / "summary.json").write_text(f'{{"optimizer_steps": {steps}}}')
    assert is_finished()
    assert not is_finished(force_restart=True)
    assert not is_finished(seed=7), "node 0 refuses this"
    assert not is_finished(finetune=container["finetune"] | {"max_train_steps": steps + 1})


def test_claim_execution_settings_may_change(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    container["finetune"]["max_train_steps"] = 7
    container["actor"]["llm_max_rollouts"] = 1
    container["vllm_config"]["env"] = {"A": "1"}
    claim = run_dir.claim(tmp_path / "run", container, force_restart=False)
    claim.lock.close()
    assert claim.resumed


def test_claim_another_experiment_is_refused_with_both_values(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    container["seed"] = 7
    with pytest.raises(ConfigError, match=says("`seed`", 42, 7, "force_restart=true")):
        run_dir.claim(tmp_path / "run", container, force_restart=False)


@pytest.mark.parametrize(("before", "now", "refused"), [(24, 25, True), (4096, 24, True), (25, 4096, False)])
def test_claim_resumed_run_keeps_the_factors_of_longrope(
    container: dict, tmp_path: Path, before: int, now: int, refused: bool
) -> None:
    """vLLM and the trainer choose them by `max_model_len`: with others the same weights are another policy."""
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    described = {"original_max_position_embeddings": 24, "max_position_embeddings": 8192, "rope_scaling": rope}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    container["model_path"] = str(tmp_path / "model")
    container["vllm_config"]["vllm_kwargs"]["max_model_len"] = before
    hold_run(tmp_path / "run", container)
    container["vllm_config"]["vllm_kwargs"]["max_model_len"] = now
    if refused:
        with pytest.raises(ConfigError, match=says("max_model_len", f"was {before} and is {now}", 24, "longrope")):
            run_dir.claim(tmp_path / "run", container, force_restart=False)
        return
    run_dir.claim(tmp_path / "run", container, force_restart=False).lock.close()


def test_claim_refused_folder_is_not_left_locked(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    with pytest.raises(ConfigError):
        run_dir.claim(tmp_path / "run", container | {"seed": 7}, force_restart=False)
    run_dir.claim(tmp_path / "run", container, force_restart=False).lock.close()


def refuse(path: Path, container: dict) -> None:
    """A start that a check refuses after the folder was claimed."""
    with run_dir.holding(run_dir.claim(path, container, force_restart=False)):
        (path / run_dir.LOG_FILE).touch()
        raise ConfigError("by a check")


def test_start_that_writes_no_run_leaves_the_folder_as_it_was(container: dict, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(ConfigError, match="by a check"):
        refuse(path, container)
    assert not path.exists()
    (path / "lost+found").mkdir(parents=True)
    with pytest.raises(ConfigError, match="by a check"):
        refuse(path, container)
    assert [entry.name for entry in path.iterdir()] == ["lost+found"]


def test_refused_start_of_a_run_that_is_there_keeps_it(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    with pytest.raises(ConfigError, match="by a check"):
        refuse(tmp_path / "run", container)
    assert (tmp_path / "run" / run_dir.LOG_FILE).exists()
    assert (tmp_path / "run" / "actor_0" / "start.sh").exists()


def test_claim_second_launcher_is_refused(container: dict, tmp_path: Path) -> None:
    with run_dir.claim(tmp_path / "run", container, force_restart=False).lock:
        with pytest.raises(ConfigError, match="another launcher is running in it"):
            run_dir.claim(tmp_path / "run", container, force_restart=False)


@pytest.mark.parametrize("force_restart", [False, True])
def test_claim_fresh_ext4_volume_is_an_empty_folder(container: dict, tmp_path: Path, force_restart: bool) -> None:
    (tmp_path / "run" / "lost+found").mkdir(parents=True)
    claim = run_dir.claim(tmp_path / "run", container, force_restart=force_restart)
    claim.lock.close()
    assert not claim.resumed
    assert (tmp_path / "run" / "lost+found").is_dir(), "it is the file system's"


@pytest.mark.parametrize("force_restart", [False, True])
def test_claim_foreign_folder_is_refused_and_kept(container: dict, tmp_path: Path, force_restart: bool) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=says("thesis.tex", "no run")):
        run_dir.claim(tmp_path / "run", container, force_restart=force_restart)
    assert (tmp_path / "run" / "thesis.tex").read_text() == "years of work"


def test_claim_force_restart_deletes_what_a_run_wrote_and_nothing_else(container: dict, tmp_path: Path) -> None:
    hold_run(tmp_path / "run", container)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "summary.json").write_text("{}")
    claim = run_dir.claim(tmp_path / "run", container | {"seed": 7}, force_restart=True)
    claim.lock.close()
    assert not claim.resumed
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["launcher.lock", "notes.txt"]


def test_claim_tiny_model_inside_the_run_folder_belongs_to_the_run(container: dict, tmp_path: Path) -> None:
    container["tiny_model"] = {"recipe": "largest", "seed": 0, "params": {}}
    container["model_path"] = str(tmp_path / "run" / "model")
    (tmp_path / "run" / "model").mkdir(parents=True)
    run_dir.claim(tmp_path / "run", container, force_restart=False).lock.close()
    run_dir.claim(tmp_path / "run", container, force_restart=True).lock.close()
    assert not (tmp_path / "run" / "model").exists()


def test_claim_file_in_the_way_is_refused(container: dict, tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="that is a file"):
        run_dir.claim(tmp_path / "run", container, force_restart=False)


@pytest.mark.parametrize(("steps", "finished"), [(95, True), (96, True), (97, False)])
def test_claim_finished_means_all_steps_asked_for(container: dict, tmp_path: Path, steps: int, finished: bool) -> None:
    container["finetune"]["max_train_steps"] = steps
    hold_run(tmp_path / "run", container)
    (tmp_path / "run" / "summary.json").write_text('{"optimizer_steps": 96}')
    claim = run_dir.claim(tmp_path / "run", container, force_restart=False)
    claim.lock.close()
    assert claim.finished is finished
