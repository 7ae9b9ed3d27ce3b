"""What the debug modes start and fix, and which configurations of them are refused by name."""

import pytest

from pipelinerl.config.debug import FIXED, STARTED, WORKING, fixed_settings, started_kinds
from pipelinerl.config.load import compose, config_keys, parse, parse_container, to_container
from pipelinerl.config.nested import with_settings
from pipelinerl.config.sections import Config
from pipelinerl.launcher.commands import FOLDERS
from pipelinerl.world import map_world
from pipelinerl.world.cluster import Cluster, Node

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
SERVERS = "debug.existing_llms=[http://10.0.0.1:8000/,https://b:8001]"


def config(*overrides: str) -> Config:
    return parse(compose("base", [*REQUIRED, *overrides]))


def test_modes_name_kinds_and_keys_that_exist() -> None:
    assert {kind for kinds in STARTED.values() for kind in kinds} < set(FOLDERS)
    assert set(FIXED) == set(STARTED)
    assert {mode for mode, kind in WORKING.items() if kind in STARTED[mode]} == set(WORKING)
    assert "servers" not in WORKING  # it ends when it is asked to
    assert {key for settings in FIXED.values() for key in settings} <= set(config_keys())


@pytest.mark.parametrize(
    ("overrides", "kinds"),
    [
        ([], None),
        (["debug.mode=servers"], {"redis", "actor_llm"}),
        (["debug.mode=actor"], {"redis", "actor_llm", "actor", "verifier", "environment"}),
        (["debug.mode=actor", SERVERS], {"redis", "actor", "verifier", "environment"}),
        (["debug.mode=finetune"], {"redis", "finetune"}),
    ],
)
def test_kinds_that_a_mode_starts(overrides: list[str], kinds: set[str] | None) -> None:
    started = started_kinds(config(*overrides))
    assert (None if started is None else set(started)) == kinds


def test_a_whole_run_keeps_every_setting() -> None:
    assert fixed_settings(config()) == {}


def test_fixed_settings_change_a_copy() -> None:
    before = to_container(compose("base", [*REQUIRED, "debug.mode=actor", SERVERS]))
    after = with_settings(before, fixed_settings(config("debug.mode=actor", SERVERS)))
    assert (after["max_lag_steps"], after["weights"]["probe"], after["world"]["accelerator"]) == (None, False, "cpu")
    assert (before["max_lag_steps"], before["weights"]["probe"], before["world"]["accelerator"]) == (8, True, "auto")
    assert after["weights"]["bucket_mb"] == before["weights"]["bucket_mb"]


def test_existing_servers_are_jobs_without_a_place() -> None:
    """Even of an experiment whose servers span more GPUs than this machine has cores."""
    overrides = ["debug.mode=actor", SERVERS, "world.replicas=2", "finetune.seq_parallel=4"]
    overrides.append("vllm_config.vllm_kwargs.tensor-parallel-size=8")
    before = config(*overrides)
    container = to_container(compose("base", [*REQUIRED, *overrides]))
    cfg = parse_container(with_settings(container, fixed_settings(before)))
    cluster = Cluster(
        accelerator="cpu", nodes=(Node(rank=0, hostname="127.0.0.1", devices=cfg.world.cpu_slots, cores=(0, 1)),)
    )
    world = map_world(cfg, cluster)
    servers = world.get("actor_llm")
    assert [(job.name, job.url, job.serves) for job in servers] == [
        ("actor_llm_0", "http://10.0.0.1:8000", 0),
        ("actor_llm_1", "https://b:8001", 1),
    ]
    assert world.weight_ports == 0
    assert len(world.get("actor")) == 2
