"""Placement of jobs on devices: worked worlds by hand, and properties over worlds of 1 to 1,024 devices."""

import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.config.environment_servers import EnvironmentServer
from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import WorldError
from pipelinerl.world.cluster import Cluster, Node
from pipelinerl.world.placement import Request, device_cores, idle_devices, place
from tests.says import says
from tests.worlds import world_section


def make_world(**changes) -> WorldSection:
    defaults = {
        "accelerator": "cuda",
        "cpu_slots": 2,
        "replicas": 1,
        "actor_fraction": 4,
        "preprocessor_fraction": 0,
        "finetune_fraction": 4,
        "verifier_replicas": 0,
    }
    return world_section(**{**defaults, **changes})


def make_cluster(*gpus: int) -> Cluster:
    return Cluster(
        accelerator="cuda", nodes=tuple(Node(rank=i, hostname=f"host-{i}", devices=n) for i, n in enumerate(gpus))
    )


def make_request(gpus_per_llm: int = 1, seq_parallel: int = 1, redis: bool = False, **world) -> Request:
    return Request(world=make_world(**world), gpus_per_llm=gpus_per_llm, seq_parallel=seq_parallel, redis=redis)


def layout(placements) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {p.name: (p.node_rank, p.devices) for p in placements if p.devices}


def test_eight_gpus_split_in_halves():
    placed = layout(place(make_request(), make_cluster(8)))
    assert placed == {
        "actor_llm_0": (0, (0,)),
        "actor_llm_1": (0, (1,)),
        "actor_llm_2": (0, (2,)),
        "actor_llm_3": (0, (3,)),
        "finetune_0": (0, (4, 5, 6, 7)),
    }


def test_environments_are_placed_like_verifiers_and_know_their_entry():
    environments = (
        EnvironmentServer(key="dice", index=0, target="a.Dice", arguments={}, replicas=2, replicas_per_actor=None),
        EnvironmentServer(key="maze", index=2, target="a.Maze", arguments={}, replicas=None, replicas_per_actor=3),
    )
    request = msgspec.structs.replace(make_request(actor_fraction=1, finetune_fraction=1), environments=environments)
    placed = [p for p in place(request, make_cluster(2, 2)) if p.kind == "environment"]
    served = [(p.name, p.environment.key, p.environment.index) for p in placed]
    assert served[:3] == [("environment_0", "dice", 0), ("environment_1", "dice", 0), ("environment_2", "maze", 2)]
    assert len(served) == 2 + 3 * 2, "two policy servers on four GPUs"
    assert [p.node_rank for p in placed[:4]] == [1, 0, 1, 0], "the trainer's node first"


def test_reference_servers_come_after_policy_servers():
    placed = layout(
        place(
            make_request(gpus_per_llm=2, actor_fraction=4, preprocessor_fraction=2, finetune_fraction=2),
            make_cluster(8),
        )
    )
    assert placed == {
        "actor_llm_0": (0, (0, 1)),
        "actor_llm_1": (0, (2, 3)),
        "preprocessor_llm_0": (0, (4, 5)),
        "finetune_0": (0, (6, 7)),
    }


def test_every_scoring_model_has_a_server_whatever_the_share():
    request = make_request(actor_fraction=5, preprocessor_fraction=1, finetune_fraction=2)
    placed = layout(place(msgspec.structs.replace(request, side_models=2), make_cluster(8)))
    assert [name for name in placed if "preprocessor" in name] == ["preprocessor_llm_0", "preprocessor_llm_1"]
    assert placed["finetune_0"] == (0, (7,))
    crowded = make_request(replicas=2, actor_fraction=3, preprocessor_fraction=4, finetune_fraction=1)
    with pytest.raises(WorldError, match=says(3, "models", "world.replicas=2")):
        place(msgspec.structs.replace(crowded, side_models=3), make_cluster(8))


def test_share_is_rounded_down_to_whole_servers_and_the_trainer_takes_the_rest():
    # half of 8 GPUs is 4: one server of 3; the trainer gets the other 5
    placed = layout(place(make_request(gpus_per_llm=3), make_cluster(8)))
    assert placed == {"actor_llm_0": (0, (0, 1, 2)), "finetune_0": (0, (3, 4, 5, 6, 7))}


def test_two_nodes_give_one_trainer_job_each_with_running_ranks():
    placements = place(make_request(actor_fraction=1, finetune_fraction=3), make_cluster(8, 8))
    trainers = [p for p in placements if p.kind == "finetune"]
    assert [(t.name, t.node_rank, t.devices, t.first_rank) for t in trainers] == [
        ("finetune_0", 0, (4, 5, 6, 7), 0),
        ("finetune_1", 1, (0, 1, 2, 3, 4, 5, 6, 7), 4),
    ]


def test_tensor_parallel_group_does_not_cross_nodes_of_three():
    # servers of 2 on nodes of 3: one per node, and each node's third GPU is the trainer's
    placed = layout(place(make_request(gpus_per_llm=2, actor_fraction=2, finetune_fraction=1), make_cluster(3, 3)))
    assert placed == {
        "actor_llm_0": (0, (0, 1)),
        "actor_llm_1": (1, (0, 1)),
        "finetune_0": (0, (2,)),
        "finetune_1": (1, (2,)),
    }


def test_server_on_two_nodes_takes_half_of_its_devices_on_each():
    placed = place(make_request(gpus_per_llm=8, nodes_per_server=2), make_cluster(8, 8))
    assert layout(placed) == {
        "actor_llm_0": (0, (0, 1, 2, 3)),
        "actor_llm_part_0": (1, (0, 1, 2, 3)),
        "finetune_0": (0, (4, 5, 6, 7)),
        "finetune_1": (1, (4, 5, 6, 7)),
    }
    assert {(p.server, p.server_node) for p in placed if p.server} == {("actor_llm_0", 0), ("actor_llm_0", 1)}


def test_servers_on_several_nodes_stay_within_their_group_of_nodes():
    placed = layout(place(make_request(gpus_per_llm=4, nodes_per_server=2, actor_fraction=8), make_cluster(4, 4, 4)))
    assert {name: place for name, place in placed.items() if "llm" in name} == {
        "actor_llm_0": (0, (0, 1)),
        "actor_llm_part_0": (1, (0, 1)),
        "actor_llm_1": (0, (2, 3)),
        "actor_llm_part_1": (1, (2, 3)),
    }
    with pytest.raises(WorldError, match=says("16 device(s)", "2 nodes")):
        place(make_request(gpus_per_llm=16, nodes_per_server=2), make_cluster(4, 4))


def test_sequence_parallel_groups_stay_inside_nodes_and_the_remainder_is_idle():
    # 2 × 4 GPUs, 2 servers: 2 + 4 left; groups of 4 fit on node 1 only, so 2 GPUs idle
    placements = place(make_request(seq_parallel=4, actor_fraction=1, finetune_fraction=3), make_cluster(4, 4))
    assert layout(placements)["finetune_0"] == (1, (0, 1, 2, 3))
    assert idle_devices(placements, make_cluster(4, 4)) == 2


def test_cpu_only_roles_sit_beside_the_trainer_and_redis_on_the_leading_node():
    placements = place(
        make_request(replicas=2, redis=True, verifier_replicas=3, actor_fraction=1, finetune_fraction=1),
        make_cluster(2, 2),
    )
    # servers fill node 0, the trainer is node 1: the first replica of a role goes there
    nodes = {p.name: p.node_rank for p in placements if not p.devices}
    assert nodes == {
        "redis_0": 0,
        "actor_0": 1,
        "actor_1": 0,
        "preprocessor_0": 1,
        "preprocessor_1": 0,
        "verifier_0": 1,
        "verifier_1": 0,
        "verifier_2": 1,
    }


def test_servers_are_divided_evenly_over_actor_replicas():
    placements = place(make_request(replicas=2, actor_fraction=5, finetune_fraction=3), make_cluster(8))
    assert [p.serves for p in placements if p.kind == "actor_llm"] == [0, 0, 0, 1, 1]


def test_two_cpu_slots_on_two_cores_pin_server_and_trainer_apart_and_leave_the_light_roles_free():
    cluster = Cluster(accelerator="cpu", nodes=(Node(rank=0, hostname="127.0.0.1", devices=2, cores=(0, 1)),))
    placements = place(make_request(verifier_replicas=1, actor_fraction=1, finetune_fraction=1), cluster)
    assert {p.name: p.cores for p in placements} == {
        "actor_llm_0": (0,),
        "finetune_0": (1,),
        "actor_0": (0, 1),
        "preprocessor_0": (0, 1),
        "verifier_0": (0, 1),
    }


@pytest.mark.parametrize(
    ("slots", "cores", "expected"),
    [
        (2, (4, 5, 6, 7, 8), [(4, 5), (6, 7, 8)]),
        (2, (3,), [(3,), (3,)]),
        (6, (0, 1), [(0,), (0,), (0,), (1,), (1,), (1,)]),
    ],
)
def test_slots_share_the_cores_of_the_machine(slots, cores, expected):
    node = Node(rank=0, hostname="localhost", devices=slots, cores=cores)
    assert [device_cores(node, (slot,)) for slot in range(slots)] == expected


def test_shared_device_holds_server_and_trainer():
    placed = layout(place(make_request(share_devices=True), make_cluster(1)))
    assert placed == {"actor_llm_0": (0, (0,)), "finetune_0": (0, (0,))}


@pytest.mark.parametrize(
    ("request_changes", "gpus", "numbers"),
    [
        ({}, (1,), ["1 node(s) with 1 GPU(s)", "share_devices=true"]),
        ({"gpus_per_llm": 4}, (2, 2), ["2 node(s) with 2 GPU(s)", "4 device(s) per server"]),
        ({"replicas": 3, "actor_fraction": 1, "finetune_fraction": 3}, (8,), ["world.replicas=3", "gives 2"]),
        ({"replicas": 2, "preprocessor_fraction": 1}, (8,), ["world.replicas=2", "preprocessor_fraction=1 gives 1"]),
        ({"seq_parallel": 8}, (8,), ["seq_parallel=8", "8 in total"]),
        ({"actor_fraction": 0}, (8,), ["world.actor_fraction=0"]),
        ({"finetune_fraction": 0}, (8,), ["world.finetune_fraction=0"]),
    ],
)
def test_impossible_world_is_refused_with_the_numbers(request_changes, gpus, numbers):
    with pytest.raises(WorldError) as error:
        place(make_request(**request_changes), make_cluster(*gpus))
    for number in numbers:
        assert number in str(error.value)


worlds = st.fixed_dictionaries(
    {
        "actor_fraction": st.integers(1, 8),
        "preprocessor_fraction": st.integers(0, 3),
        "finetune_fraction": st.integers(1, 8),
        "replicas": st.integers(1, 4),
        "verifier_replicas": st.integers(0, 5),
        "share_devices": st.booleans(),
    }
)
equal_nodes = st.builds(lambda nodes, gpus: (gpus,) * nodes, st.integers(1, 128), st.integers(1, 8))
mixed_nodes = st.lists(st.integers(1, 8), min_size=1, max_size=40).map(tuple)


@settings(max_examples=300, deadline=None)
@given(
    world=worlds,
    gpus=st.one_of(equal_nodes, mixed_nodes),
    gpus_per_llm=st.sampled_from([1, 2, 3, 4, 8]),
    seq_parallel=st.sampled_from([1, 2, 4]),
    redis=st.booleans(),
)
def test_any_world_is_placed_whole_or_refused(world, gpus, gpus_per_llm, seq_parallel, redis):
    cluster = make_cluster(*gpus)
    try:
        placements = place(make_request(gpus_per_llm, seq_parallel, redis, **world), cluster)
    except WorldError:
        assert must_be_refused_or_is_tight(world, gpus, gpus_per_llm, seq_parallel)
        return
    by_kind = {kind: [p for p in placements if p.kind == kind] for kind in {p.kind for p in placements}}
    servers = by_kind["actor_llm"] + by_kind.get("preprocessor_llm", [])
    trainers = by_kind["finetune"]

    groups = [servers, trainers] if world["share_devices"] else [servers + trainers]
    for group in groups:
        used = [(p.node_rank, device) for p in group for device in p.devices]
        assert len(used) == len(set(used))
        assert all(0 <= device < gpus[node] for node, device in used)
    assert all(len(p.devices) == gpus_per_llm for p in servers)
    assert all(len(t.devices) % seq_parallel == 0 and t.devices for t in trainers)
    assert len({t.node_rank for t in trainers}) == len(trainers)
    assert [t.first_rank for t in trainers] == [sum(len(u.devices) for u in trainers[:i]) for i in range(len(trainers))]

    counts = {kind: len(jobs) for kind, jobs in by_kind.items()}
    assert counts["actor"] == counts["preprocessor"] == world["replicas"]
    assert counts.get("verifier", 0) == world["verifier_replicas"]
    assert counts.get("redis", 0) == int(redis)
    assert counts.get("preprocessor_llm", 0) >= min(world["preprocessor_fraction"], 1)
    assert len({p.name for p in placements}) == len(placements)
    for kind in ("actor_llm", "preprocessor_llm"):
        served = [p.serves for p in by_kind.get(kind, [])]
        if served:
            sizes = [served.count(replica) for replica in range(world["replicas"])]
            assert min(sizes) >= 1
            assert max(sizes) - min(sizes) <= 1

    used = {(p.node_rank, device) for p in placements for device in p.devices}
    idle = idle_devices(placements, cluster)
    assert len(used) + idle == sum(gpus)
    assert idle <= (seq_parallel - 1) * len(gpus)


def must_be_refused_or_is_tight(world, gpus, gpus_per_llm, seq_parallel) -> bool:
    """A world with room for every role, twice over, may not be refused."""
    fractions = ("actor_fraction", "preprocessor_fraction") + (() if world["share_devices"] else ("finetune_fraction",))
    parts = sum(world[key] for key in fractions)
    smallest = min(world[key] for key in fractions if world[key])
    per_node_fits = min(gpus) >= gpus_per_llm + seq_parallel and min(gpus) % gpus_per_llm == 0
    room = sum(gpus) * smallest // parts >= 2 * max(gpus_per_llm * world["replicas"], seq_parallel + 8)
    return not (per_node_fits and room)


def test_thousand_gpus_are_placed_within_seconds():
    start = time.process_time()
    placements = place(make_request(actor_fraction=5, finetune_fraction=3), make_cluster(*[8] * 128))
    elapsed = time.process_time() - start
    assert sum(len(p.devices) for p in placements) == 1024
    assert elapsed < 10.0
