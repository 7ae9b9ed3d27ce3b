"""The world map: ports, URLs, lookups, agreement between launchers, and its file."""

import socket

import pytest

from pipelinerl.config import load
from pipelinerl.errors import ConfigError, WorldError
from pipelinerl.world import Cluster, Job, Node, WorldMap, build_world, check_local_devices, map_world
from pipelinerl.world.network import derive_port_base, ephemeral_start, find_port_block
from tests.ports import free_port
from tests.says import says

REQUIRED = ["output_dir=/nowhere", "actor.rollout_policy=a.b", "dataset_loader=a.b"]


def make_config(*overrides: str):
    return load.parse(load.compose("base", [*REQUIRED, *overrides]))


CPU = ["world.accelerator=cpu", "world.actor_fraction=1", "world.finetune_fraction=1"]


def two_nodes(rank: int = 0) -> Cluster:
    nodes = (Node(rank=0, hostname="alpha", devices=4), Node(rank=1, hostname="beta", devices=4))
    return Cluster(accelerator="cuda", nodes=nodes, rank=rank, identity="job-7")


def all_ports(world: WorldMap) -> list[int]:
    listening = [job.port for job in world.jobs if job.port is not None]
    return [*listening, world.master_port, *range(world.weight_port, world.weight_port + world.weight_ports)]


def test_cpu_world_has_every_role_on_loopback():
    world = build_world(make_config(*CPU, "world.verifier_replicas=1"), {})
    assert [job.name for job in world.jobs] == ["actor_llm_0", "finetune_0", "actor_0", "preprocessor_0", "verifier_0"]
    assert {job.hostname for job in world.jobs} == {"127.0.0.1"}
    assert world.bind_host == "127.0.0.1"
    assert world.job("actor_llm_0").url == f"http://127.0.0.1:{world.job('actor_llm_0').port}"
    assert world.job("actor_0").port is None
    assert (world.accelerator, world.weight_backend, world.trainer_world_size) == ("cpu", "tcp", 1)


def test_free_ports_are_distinct_and_below_the_ephemeral_range():
    ports = all_ports(build_world(make_config(*CPU, "streams=redis"), {}))
    assert len(set(ports)) == len(ports)
    assert all(1024 < port < ephemeral_start() for port in ports)


def test_port_block_avoids_a_port_in_use():
    taken = set(range(15000, 40000)) - set(range(20000, 20010))
    base = find_port_block("127.0.0.1", 8, is_free=lambda _host, port: port not in taken or port > 40000)
    assert 20000 <= base <= 20002


def test_configured_port_in_use_is_refused_by_number_and_key():
    port = free_port() + 1
    with socket.socket() as blocker:
        blocker.bind(("127.0.0.1", port))
        blocker.listen()
        with pytest.raises(WorldError, match=rf"world\.port_base={port - 1}: port {port} of actor_llm_0 is in use"):
            map_world(make_config(*CPU, f"world.port_base={port - 1}"), one_cpu_node())


def test_nodes_of_one_server_know_where_they_meet_and_every_launcher_agrees():
    config = make_config("world.nodes_per_server=2", "++vllm_config.vllm_kwargs.tensor-parallel-size=4")
    world, other = (map_world(config, two_nodes(rank)) for rank in (0, 1))
    assert world.digest() == other.digest()
    server, part = world.job("actor_llm_0"), world.job("actor_llm_part_0")
    assert server.span is not None
    assert part.span is not None
    assert (server.gpus, server.num_ranks, server.span.node, server.node_rank) == ((0, 1), 4, 0, 0)
    assert (part.gpus, part.num_ranks, part.span.node, part.node_rank) == ((0, 1), 4, 1, 1)
    assert server.span.address == part.span.address == part.url == f"tcp://alpha:{part.span.port}"
    ports = [*all_ports(world), part.span.port]
    assert len(set(ports)) == len(ports)
    assert part.port is None
    assert [job.name for job in world.get("actor_llm")] == ["actor_llm_0"]


def test_server_s_devices_must_be_divisible_by_its_nodes():
    with pytest.raises(ConfigError, match=says("4 device(s)", "3 nodes")):
        map_world(
            make_config("world.nodes_per_server=3", "++vllm_config.vllm_kwargs.tensor-parallel-size=4"), two_nodes()
        )


def test_port_base_that_would_leave_the_range_is_refused():
    gpus = Cluster(accelerator="cuda", nodes=tuple(Node(rank=i, hostname=f"h{i}", devices=8) for i in range(128)))
    with pytest.raises(WorldError, match=r"world\.port_base=65000: .* beyond 65535"):
        map_world(make_config("world.port_base=65000"), gpus)


def one_cpu_node() -> Cluster:
    return Cluster(accelerator="cpu", nodes=(Node(rank=0, hostname="127.0.0.1", devices=2, cores=(0, 1)),))


def test_configured_redis_port_is_its_own_key():
    with socket.socket() as blocker:
        blocker.bind(("127.0.0.1", 0))
        blocker.listen()
        port = blocker.getsockname()[1]
        with pytest.raises(WorldError, match=rf"streams\.port={port}: port {port} of redis_0"):
            map_world(make_config(*CPU, "streams=redis", f"streams.port={port}"), one_cpu_node())


def test_external_redis_is_not_a_job():
    config = make_config(*CPU, "streams=redis", "streams.external=true", "streams.host=db", "streams.port=6379")
    assert map_world(config, one_cpu_node()).get("redis") == ()


def test_launchers_of_all_nodes_build_the_same_map():
    config = make_config("streams=redis")
    maps = [map_world(config, two_nodes(rank)) for rank in (0, 1)]
    assert maps[0] == maps[1]
    assert maps[0].digest() == maps[1].digest()
    assert maps[0].master_port == derive_port_base("job-7", len(all_ports(maps[0])))
    other = map_world(config, Cluster(accelerator="cuda", nodes=two_nodes().nodes, identity="job-8"))
    assert other.digest() != maps[0].digest()


def test_nodes_cores_are_their_own_affair():
    def world(cores):
        nodes = tuple(Node(rank=i, hostname=h, devices=2, cores=cores) for i, h in enumerate(("a", "b")))
        cluster = Cluster(accelerator="cpu", nodes=nodes, identity="x")
        return map_world(make_config(*CPU), cluster, check=False)

    assert world((0, 1)) != world((4, 5))
    assert world((0, 1)).digest() == world((4, 5)).digest()


def test_several_nodes_use_host_names_and_the_trainers_node_leads_the_rendezvous():
    world = map_world(make_config(), two_nodes(), check=False)
    assert [job.hostname for job in world.get("actor_llm")] == ["alpha"] * 4
    assert world.master_addr == "beta"
    assert world.bind_host == "0.0.0.0"
    assert world.get_actor_urls()[0] == f"http://alpha:{world.job('actor_llm_0').port}"
    assert [job.name for job in world.on_node(1)] == ["finetune_0", "actor_0", "preprocessor_0", "verifier_0"]


def test_ipv6_host_is_bracketed_in_urls():
    nodes = (Node(rank=0, hostname="fd00::1", devices=2), Node(rank=1, hostname="fd00::2", devices=2))
    world = map_world(make_config(), Cluster(accelerator="cuda", nodes=nodes, identity="x"), check=False)
    assert world.get_actor_urls()[0].startswith("http://[fd00::1]:")


def test_weight_transfer_has_two_ports_per_policy_server():
    world = map_world(make_config("world.preprocessor_fraction=2"), two_nodes(), check=False)
    assert world.weight_ports == 2 * len(world.get("actor_llm"))


def test_each_replica_has_its_servers():
    world = map_world(make_config("world.replicas=2"), two_nodes(), check=False)
    assert [s.name for s in world.servers_of(world.job("actor_1"))] == ["actor_llm_2", "actor_llm_3"]
    assert world.servers_of(world.job("preprocessor_0")) == ()


def test_backend_follows_the_devices():
    assert map_world(make_config(), two_nodes(), check=False).weight_backend == "nccl"
    shared = map_world(make_config("world.share_devices=true"), two_nodes(), check=False)
    assert shared.weight_backend == "tcp"
    alone = Cluster(accelerator="cuda", nodes=(Node(rank=0, hostname="127.0.0.1", devices=1),))
    assert map_world(make_config("world.share_devices=true"), alone, check=False).weight_backend == "ipc"


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["weights.backend=ipc"], "weights.backend=ipc cannot work in a world of 8 GPU"),
        (["weights.backend=ipc", "world.share_devices=true"], "weights.backend=ipc cannot work in a world of 8 GPU"),
        (["weights.backend=nccl", "world.share_devices=true"], "share_devices=true: use auto or tcp"),
    ],
)
def test_backend_that_the_devices_cannot_carry_is_refused_before_start(overrides, numbers):
    with pytest.raises(WorldError, match=numbers):
        map_world(make_config(*overrides), two_nodes(), check=False)


def test_tcp_carries_weights_between_any_devices():
    world = map_world(make_config("weights.backend=tcp"), two_nodes(), check=False)
    assert world.transfer_backend("tcp") == "tcp"


def test_saved_map_is_read_back(tmp_path):
    world = map_world(make_config("world.verifier_replicas=1"), two_nodes(), check=False)
    world.save(tmp_path)
    assert WorldMap.load(tmp_path) == world


def test_missing_or_damaged_map_is_named(tmp_path):
    with pytest.raises(WorldError, match=r"world\.json does not exist"):
        WorldMap.load(tmp_path)
    (tmp_path / "conf").mkdir()
    map_world(make_config(), two_nodes(), check=False).save(tmp_path)
    path = tmp_path / "conf" / "world.json"
    for content in (b'{"jobs": 3}', path.read_bytes().replace(b"actor", b"act\xffr")):
        path.write_bytes(content)
        with pytest.raises(WorldError, match="is not a world map"):
            WorldMap.load(tmp_path)


def test_unknown_job_is_refused_with_the_known_names():
    with pytest.raises(WorldError, match=r"no job 'actor_9'.*actor_llm_0"):
        map_world(make_config(), two_nodes(), check=False).job("actor_9")


def test_job_dicts_rebuild_jobs_and_show_verifiers_as_environments():
    world = map_world(make_config("world.verifier_replicas=1"), two_nodes(), check=False)
    jobs = [Job(**job) for job in world.job_dicts()]
    assert [job.kind for job in jobs].count("environment") == 1
    environment = next(job for job in jobs if job.kind == "environment")
    assert environment.port == world.job("verifier_0").port


def test_configured_gpus_that_are_not_there_are_refused_before_start(monkeypatch):
    monkeypatch.setattr("pipelinerl.world.map.count_visible_gpus", lambda env: 2)
    world = map_world(make_config(), two_nodes(), check=False)
    with pytest.raises(WorldError, match=says("node 1 (beta)", "4 GPU(s)", 2)):
        check_local_devices(world, 1, {})


@pytest.mark.parametrize(
    ("rank", "port_of", "owner"),
    [(0, lambda world: world.job("actor_llm_0").port, "actor_llm_0"), (1, lambda world: world.master_port, "rend")],
)
def test_each_launcher_checks_the_ports_of_its_own_node(rank, port_of, owner):
    count = len(all_ports(map_world(make_config(), two_nodes(), check=False)))
    config = make_config(f"world.port_base={find_port_block('0.0.0.0', count)}")
    taken = port_of(map_world(config, two_nodes(), check=False))
    with socket.socket() as blocker:
        blocker.bind(("0.0.0.0", taken))
        blocker.listen()
        with pytest.raises(WorldError, match=rf"port {taken} of .*{owner}"):
            map_world(config, two_nodes(rank))
        map_world(config, two_nodes(1 - rank))
