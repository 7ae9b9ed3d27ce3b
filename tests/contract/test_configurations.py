"""Every shipped configuration is valid, fits its machine, and is shown by a dry run on a simulated cluster."""

import re

import pytest

from pipelinerl.config import load
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import preflight
from pipelinerl.launcher.program import launch
from pipelinerl.plan.memory import memory_plan
from pipelinerl.plan.model_shape import find_model_shape
from pipelinerl.plan.training_memory import GIB
from pipelinerl.world import Cluster, Node, WorldMap, map_world

REQUIRED = (
    "actor.rollout_policy=pipelinerl.domains.largest.generate_rollout",
    "dataset_loader=pipelinerl.domains.largest.load_problems",
    "wandb.mode=disabled",
)
CLUSTERS = {
    "base": (8,),
    "base_4gpu": (4,),
    "base_1gpu": (1,),
    "base_2node": (8, 8),
    "fsdp2": (8,),
    "deepspeed_stage1": (8,),
    "deepspeed_stage2": (8,),
    "deepspeed_stage3": (8,),
}
GPU_GIB = {"base_1gpu": 24}


def simulated(gpus: tuple[int, ...]) -> Cluster:
    hosts = ["127.0.0.1"] if len(gpus) == 1 else [f"host-{i}" for i in range(len(gpus))]
    nodes = tuple(Node(rank=i, hostname=hosts[i], devices=n) for i, n in enumerate(gpus))
    return Cluster(accelerator="cuda", nodes=nodes, identity="test" if len(gpus) > 1 else None)


def place(name: str) -> tuple:
    config = load.validate(load.compose(name, [*REQUIRED, "output_dir=/nowhere"]))
    return config, map_world(config, simulated(CLUSTERS[name]), check=False)


@pytest.mark.parametrize("name", CLUSTERS)
def test_configuration_is_valid_and_uses_every_gpu(name):
    _, world = place(name)
    assert world.idle_devices == 0
    assert len(world.get("actor_llm")) >= 1
    assert world.trainer_world_size >= 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_configuration_fits_the_memory_it_names(name):
    config, world = place(name)
    plans = memory_plan(config, world, find_model_shape(config.model_path), GPU_GIB.get(name, 80) * GIB)
    assert [plan.kind for plan in plans if not plan.fits] == []


@pytest.mark.parametrize("name", CLUSTERS)
def test_configuration_is_shown_by_a_dry_run_that_writes_nothing(name, tmp_path, capsys, monkeypatch):
    """Without the check of the domain, which is the quickstart's, and without asking a hub for the model."""
    monkeypatch.setattr(preflight, "check_domain", lambda container: [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gpus = CLUSTERS[name]
    hosts = [f"world.hosts=[{','.join(f'host-{i}' for i in range(len(gpus)))}]"] if len(gpus) > 1 else []
    overrides = [*REQUIRED, *hosts, f"output_dir={tmp_path / 'run'}", "dry_run=true", f"world.gpus_per_node={gpus[0]}"]
    assert launch(load.compose(name, overrides), overrides) == 0
    shown = capsys.readouterr().out
    assert "World: " in shown
    assert "Memory per GPU" in shown
    assert "pipelinerl.finetune" in shown
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_world_that_does_not_fit_shows_its_memory_and_what_starts(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(preflight, "check_domain", lambda container: [])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    overrides = [*REQUIRED, f"output_dir={tmp_path / 'run'}", "dry_run=true", "world.gpus_per_node=8"]
    overrides += ["world.gpu=A100-40GB", "model_path=Qwen/Qwen2.5-32B"]
    with pytest.raises(ConfigError, match=r"memory plan \(A100-40GB\)") as refusal:  # exit code 2
        launch(load.compose("base", overrides), overrides)
    assert "MORE THAN" in capsys.readouterr().out
    proposed = re.findall(r"[a-z_.-]+=\S+", str(refusal.value).partition("it fits ")[2])
    assert launch(load.compose("base", [*overrides, *proposed]), [*overrides, *proposed]) == 0


def test_two_nodes_separate_servers_and_trainer():
    _, world = place("base_2node")
    assert {job.node_rank for job in world.get("actor_llm")} == {0}
    assert [(job.node_rank, job.num_ranks) for job in world.get("finetune")] == [(1, 8)]
    assert world.get("redis")[0].node_rank == 0


def test_one_gpu_is_shared_through_ipc():
    _, world = place("base_1gpu")
    assert world.weight_backend == "ipc"
    assert world.job("actor_llm_0").gpus == world.job("finetune_0").gpus == (0,)


def test_quickstart_with_ranks_puts_two_servers_beside_two_ranks():
    config = load.validate(load.compose("quickstart_ranks"))
    node = Node(rank=0, hostname="127.0.0.1", devices=config.world.cpu_slots, cores=(0, 1))
    world = map_world(config, Cluster(accelerator="cpu", nodes=(node,)), check=False)
    assert [job.cores for job in world.get("actor_llm")] == [(0,), (0,)]
    assert [(job.num_ranks, job.cores) for job in world.get("finetune")] == [(2, (1,))]


def test_world_of_1024_gpus_is_mapped():
    config = load.validate(load.compose("base", [*REQUIRED, "output_dir=/nowhere", "streams=redis"]))
    world: WorldMap = map_world(config, simulated((8,) * 128), check=False)
    assert sum(len(job.gpus) for job in world.jobs) == 1024
    ports = [job.port for job in world.jobs if job.port]
    assert len(set(ports)) == len(ports)
    assert world.weight_port + world.weight_ports < 65536
