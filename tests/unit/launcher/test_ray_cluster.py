"""What the launcher asks of a Ray cluster, and what it makes of Ray's answer."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import WorldError
from pipelinerl.launcher import ray_engine
from pipelinerl.launcher.losses import decide
from pipelinerl.launcher.ray_cluster import Unit, cluster_of, units_of, world_at
from pipelinerl.launcher.ray_engine import Placed, RayEngine
from pipelinerl.launcher.ray_role import role_variables
from pipelinerl.world import Job, Node, WorldMap
from tests.says import says
from tests.worlds import world_section


def section(**changes: Any) -> WorldSection:
    fields = {"accelerator": "auto", "actor_fraction": 1, "finetune_fraction": 1, "verifier_replicas": 0}
    return world_section(**{**fields, **changes})


def ray_node(name: str, address: str, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": address, "Resources": resources}


def two_node_world() -> WorldMap:
    jobs = (
        Job(
            name="actor_llm_0", kind="actor_llm", hostname="a", port=7001, url="http://a:7001", gpus=(0, 1), num_ranks=2
        ),
        Job(name="finetune_0", kind="finetune", hostname="a", gpus=(2, 3), num_ranks=2),
        Job(
            name="finetune_1", kind="finetune", hostname="b", node_rank=1, replica_idx=1, gpus=(0, 1, 2, 3), num_ranks=4
        ),
        Job(name="actor_0", kind="actor", hostname="a"),
    )
    nodes = (Node(rank=0, hostname="a", devices=4), Node(rank=1, hostname="b", devices=4))
    return WorldMap(accelerator="cuda", nodes=nodes, jobs=jobs, master_port=1, weight_port=2, weight_ports=2)


def test_nodes_without_gpu_have_no_part_in_a_gpu_world() -> None:
    nodes = [ray_node("2", "b", GPU=8.0), ray_node("1", "head", CPU=4.0), ray_node("3", "a", GPU=4.0)]
    cluster = cluster_of(nodes, section(), "run")
    assert [(node.rank, node.hostname, node.devices) for node in cluster.nodes] == [(0, "a", 4), (1, "b", 8)]
    assert (cluster.accelerator, cluster.identity) == ("cuda", "run")
    with pytest.raises(WorldError, match=says("Ray cluster", "GPU")):
        cluster_of([ray_node("1", "head", CPU=4.0)], section(), "run")


def test_several_nodes_of_one_machine_search_a_free_block_of_ports() -> None:
    nodes = [ray_node("1", "127.0.0.1", CPU=2.0), ray_node("2", "127.0.0.1", CPU=2.0)]
    cluster = cluster_of(nodes, section(accelerator="cpu", cpu_slots=3), "run")
    assert [node.devices for node in cluster.nodes] == [3, 3]
    assert cluster.identity is None


def test_the_trainer_s_ranks_are_one_unit_and_are_placed_first() -> None:
    units = units_of(two_node_world())
    assert [unit.name for unit in units] == ["finetune_0", "actor_llm_0", "actor_0"]
    assert units[0].bundles == ({"CPU": 2.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 4.0})
    assert units[2].bundles == ({"CPU": 1.0},)


def test_a_job_that_ray_put_elsewhere_has_its_address_there_and_counts_its_own_gpus() -> None:
    world = world_at(two_node_world(), {"finetune_0": "b", "finetune_1": "a", "actor_llm_0": "c"})
    assert world.master_addr == "b"
    assert [(job.hostname, job.node_rank, job.gpus) for job in world.get("finetune")] == [
        ("b", 1, (0, 1)),
        ("a", 0, (0, 1, 2, 3)),
    ]
    assert world.job("actor_llm_0").url == "http://c:7001"
    assert world.job("actor_0").hostname == "a"


def test_a_role_inherits_neither_ray_s_token_nor_its_number_of_threads() -> None:
    kept = role_variables({"RAY_AUTH_TOKEN": "x", "OMP_NUM_THREADS": "1", "HF_HOME": "/models", "RANK": "3"})
    assert kept == {"HF_HOME": "/models"}


@pytest.mark.parametrize(
    ("address", "alive", "action"),
    [(None, (), "end"), (None, ("n2",), "move"), ("10.0.0.1:6379", (), "move")],
)
async def test_trainer_moves_unless_no_node_can_take_it(
    address: str | None, alive: tuple[str, ...], action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node can join the cluster that the launcher starts. Another cluster may get new ones."""
    ray = pytest.importorskip("ray")
    trainer = Unit(jobs=(Job(name="finetune_0", kind="finetune"),), bundles=({"CPU": 1.0},))
    placed = Placed(trainer, group=object(), nodes=("n1",))
    engine = RayEngine.__new__(RayEngine)
    engine._limits = SimpleNamespace(ray_address=address)
    engine._placed = {"finetune_0": placed}

    async def lose(_: Placed) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(engine, "_run_once", lose)
    monkeypatch.setattr(engine, "_remove", lambda placed: None)
    monkeypatch.setattr(ray_engine, "alive_nodes", lambda: [{"NodeID": name} for name in alive])
    decision = decide(await engine._run(placed))
    assert decision.action == action
    if action == "end":
        assert decision.reason == "its node is lost, and the cluster that the launcher started has no other"


async def test_ranks_that_are_left_have_ended_before_their_unit_is_placed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One node is lost and one does not answer. The ranks of the third hold its GPUs until they are dead."""
    ray = pytest.importorskip("ray")
    done: list[str] = []

    def actor(name: str, error: Exception | None = None) -> Any:
        def kill() -> Future[None]:
            done.append(name)
            future: Future[None] = Future()
            if error is not None:
                future.set_exception(error)
            elif name != "silent":
                future.set_result(None)
            return future

        return SimpleNamespace(kill=SimpleNamespace(remote=lambda: SimpleNamespace(future=kill)))

    lost = ray.exceptions.RayActorError()
    monkeypatch.setattr(ray_engine, "STOP_MARGIN_S", 0.1)
    trainer = Unit(jobs=(Job(name="finetune_0", kind="finetune"),), bundles=({"CPU": 1.0},))
    actors = [actor("gone", lost), actor("silent"), actor("left")]
    placed = Placed(trainer, group=object(), nodes=("n1",), actors=actors)
    engine = RayEngine.__new__(RayEngine)
    engine._limits, engine._placed = SimpleNamespace(ray_address="h:1"), {"finetune_0": placed}

    async def lose(_: Placed) -> None:
        raise lost

    monkeypatch.setattr(engine, "_run_once", lose)
    monkeypatch.setattr(engine, "_remove", lambda placed: done.append("removed"))
    monkeypatch.setattr(ray_engine, "alive_nodes", list)
    assert decide(await engine._run(placed)).action == "move"
    assert done == ["gone", "silent", "left", "removed"]
