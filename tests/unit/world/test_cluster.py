"""The cluster as torchrun, SLURM, WORLD_SIZE/RANK and `world.hosts` describe it."""

import pytest

from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import WorldError
from pipelinerl.world.cluster import (
    Node,
    count_visible_gpus,
    expand_nodelist,
    read_cluster,
    read_node_environment,
    visible_device_names,
    visible_devices,
)
from tests.says import says
from tests.worlds import world_section


def make_world(**changes) -> WorldSection:
    defaults = {
        "accelerator": "auto",
        "cpu_slots": 2,
        "replicas": 1,
        "actor_fraction": 1,
        "preprocessor_fraction": 0,
        "finetune_fraction": 1,
        "verifier_replicas": 0,
    }
    return world_section(**{**defaults, **changes})


def read(env=None, *, gpus=8, cores=(0, 1), dry_run=False, **world):
    return read_cluster(
        make_world(**world), env or {}, dry_run=dry_run, count_gpus=lambda: gpus, affinity=lambda: set(cores)
    )


def test_machine_without_gpus_is_refused_unless_cpu_is_asked_for():
    with pytest.raises(WorldError, match=says("CPU configuration", "world.gpus_per_node")):
        read(gpus=0)


def test_machine_without_gpus_becomes_a_cpu_node_on_loopback():
    cluster = read(gpus=0, cores=(3, 1), cpu_slots=4, accelerator="cpu")
    assert cluster.accelerator == "cpu"
    assert cluster.nodes == (Node(rank=0, hostname="127.0.0.1", devices=4, cores=(1, 3)),)
    assert cluster.identity is None


def test_detected_gpus_make_a_cuda_node():
    cluster = read(gpus=4)
    assert (cluster.accelerator, cluster.nodes) == ("cuda", (Node(rank=0, hostname="127.0.0.1", devices=4),))


def test_cpu_can_be_asked_for_on_a_gpu_machine():
    assert read(gpus=4, accelerator="cpu").accelerator == "cpu"


def test_cuda_without_gpus_is_refused():
    with pytest.raises(WorldError, match=r"world\.accelerator=cuda.*gpus_per_node"):
        read(gpus=0, accelerator="cuda")


PLAIN = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "alpha", "MASTER_PORT": "1234"}


def test_world_size_and_rank_with_configured_hosts():
    cluster = read(PLAIN, hosts=["alpha", "beta"], gpus_per_node=[8, 4])
    assert [(n.rank, n.hostname, n.devices) for n in cluster.nodes] == [(0, "alpha", 8), (1, "beta", 4)]
    assert (cluster.rank, cluster.identity) == (1, "alpha:1234")


def test_run_id_names_the_run_before_the_environment_does():
    assert read(PLAIN, hosts=["alpha", "beta"], run_id="job-7").identity == "job-7"


def test_hosts_come_from_the_environment_too():
    cluster = read({**PLAIN, "PIPELINERL_HOSTS": "10.0.0.1, 10.0.0.2"})
    assert [n.hostname for n in cluster.nodes] == ["10.0.0.1", "10.0.0.2"]


def test_unnamed_nodes_are_refused_and_never_guessed():
    with pytest.raises(WorldError, match=says("2 nodes", "world.hosts")):
        read(PLAIN)


@pytest.mark.parametrize(
    ("env", "world", "message"),
    [
        ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE=2 without RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, {}, "node rank 2 of 2 nodes"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, {}, "WORLD_SIZE='two'"),
        (PLAIN, {"hosts": ["a", "b", "c"]}, "names 3 hosts"),
        (PLAIN, {"hosts": ["a", "a"]}, "names a host twice"),
        ({}, {"hosts": ["a", "b"]}, "names 2 hosts"),
        (PLAIN, {"hosts": ["a", "b"], "gpus_per_node": [8]}, r"gpus_per_node=\[8\]"),
        ({"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, {}, "LOCAL_WORLD_SIZE=8"),
    ],
)
def test_contradictory_environment_is_refused(env, world, message):
    with pytest.raises(WorldError, match=message):
        read(env, **world)


def test_dry_run_takes_the_nodes_from_hosts_alone():
    cluster = read({}, dry_run=True, hosts=["a", "b"], gpus_per_node=8)
    assert [(n.hostname, n.devices) for n in cluster.nodes] == [("a", 8), ("b", 8)]
    assert cluster.rank == 0


def test_torchrun_gives_the_group_rank():
    env = {"WORLD_SIZE": "2", "RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "r1"}
    cluster = read(env, hosts=["a", "b"])
    assert (cluster.rank, cluster.identity) == (1, "r1")


SLURM = {
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "gpu[01-03,11]",
}


def test_slurm_gives_hosts_and_rank():
    cluster = read(SLURM)
    assert [n.hostname for n in cluster.nodes] == ["gpu01", "gpu02", "gpu03", "gpu11"]
    assert (cluster.rank, cluster.identity) == (2, "slurm-77.0")


def test_slurm_step_counts_before_the_job():
    env = {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu02"}
    assert [n.hostname for n in read(env).nodes] == ["127.0.0.1"]


@pytest.mark.parametrize("tasks", [{"SLURM_LOCALID": "1"}, {"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}])
def test_slurm_with_several_tasks_per_node_is_refused(tasks):
    with pytest.raises(WorldError, match="--ntasks-per-node=1"):
        read({**SLURM, **tasks})


def test_slurm_allocation_for_many_tasks_may_run_one_launcher():
    assert read({**SLURM, "SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}).rank == 2


def test_world_size_counts_before_slurm():
    assert read_node_environment({**SLURM, **PLAIN}).source == "WORLD_SIZE and RANK"


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("node7", ("node7",)),
        ("a,b", ("a", "b")),
        ("gpu[08-10],login", ("gpu08", "gpu09", "gpu10", "login")),
        ("r[1-2]n[3,5]", ("r1n3", "r1n5", "r2n3", "r2n5")),
        ("x-[1]-dgx", ("x-1-dgx",)),
    ],
)
def test_slurm_nodelist_is_expanded(nodelist, hosts):
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["gpu[1-", "gpu1-2]", "a,,b"])
def test_slurm_nodelist_that_is_cut_off_is_refused(nodelist):
    with pytest.raises(WorldError, match="cannot be read"):
        expand_nodelist(nodelist)


def test_slurm_nodelist_with_a_bad_range_is_refused():
    with pytest.raises(WorldError, match="'a-b'"):
        expand_nodelist("gpu[a-b]")


@pytest.mark.parametrize(
    ("value", "names"), [(None, None), ("", ()), ("2,3", ("2", "3")), ("1,-1,2", ("1",)), ("GPU-ab", ("GPU-ab",))]
)
def test_cuda_visible_devices_stops_where_cuda_stops(value, names):
    assert visible_device_names({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == names


def test_visible_gpus_are_counted_within_the_machine(monkeypatch):
    monkeypatch.setattr("pipelinerl.world.cluster.gpu_memory_bytes", lambda: (80, 80, 80, 80))
    assert count_visible_gpus({}) == 4
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": "1,3"}) == 2
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": "3,4"}) == 1
    assert count_visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_job_devices_are_numbered_within_the_launchers_own():
    assert visible_devices((0, 1), {}) == "0,1"
    assert visible_devices((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == "4,7"
    assert visible_devices((1,), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == "GPU-b"
