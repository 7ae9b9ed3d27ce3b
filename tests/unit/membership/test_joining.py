"""Addresses of runs, and the job of a role that starts alone."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DeadlineError, WorldError
from pipelinerl.membership import address, entry
from pipelinerl.membership.address import RedisAddress, fetch_run, parse_address
from pipelinerl.membership.entry import part_name
from pipelinerl.membership.joining import Whereabouts, claim_name, job_of, reach_of, read_span
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.role import status_name
from pipelinerl.membership.stores import FolderStore, RedisStore, StoreRefusedError
from pipelinerl.world import Job, Span, WorldMap
from pipelinerl.world.cluster import Node
from tests.says import says


@pytest.fixture(scope="module")
def cfg() -> Config:
    return parse(compose("quickstart", ["output_dir=/nowhere", "world.replicas=2"]))


def world(host: str = "127.0.0.1") -> WorldMap:
    jobs = (
        Job(name="actor_llm_0", kind="actor_llm", hostname=host, port=5, url=f"http://{host}:5", cores=(1,)),
        Job(name="actor_llm_1", kind="actor_llm", replica_idx=1, hostname=host, port=6, url=f"http://{host}:6"),
        Job(name="actor_0", kind="actor", hostname=host),
    )
    nodes = (Node(rank=0, hostname=host, devices=2),)
    return WorldMap(accelerator="cpu", nodes=nodes, jobs=jobs, master_port=1, weight_port=2, weight_ports=4)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("results/a run", Path("results/a run")),
        ("/shared/x", Path("/shared/x")),
        ("redis://10.0.0.1:15000/guessing-0a1b", RedisAddress("10.0.0.1", 15000, "guessing-0a1b")),
        ("redis://[fd00::1]:1/x", RedisAddress("fd00::1", 1, "x")),
    ],
)
def test_addresses_are_read_as_they_are_written(text: str, address: Path | RedisAddress) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text", ["redis://h", "redis://h/x", "redis://h:1", "redis://h:1/a/b", "http://h:1/x", "redis://h:99999/x"]
)
def test_what_is_no_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="write redis://HOST:PORT/RUN"):
        parse_address(text)


def test_password_in_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("no password", "PIPELINERL_REDIS_PASSWORD")):
        parse_address("redis://:hunter2@h:1/x")


def test_folder_of_another_run_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("seed: 1")
    with pytest.raises(ConfigError, match=says(f"--run-dir {tmp_path}", "another run", "127.0.0.1")):
        fetch_run(RedisAddress("127.0.0.1", 1, "x"), tmp_path, wait_s=0)


def test_placed_job_is_taken_as_it_is_or_moved(cfg: Config) -> None:
    assert job_of("actor_llm_0", world(), cfg, Whereabouts(), "") == world().job("actor_llm_0")
    moved = job_of("actor_llm_0", world(), cfg, Whereabouts(hostname="fd00::7", port=99), "")
    assert (moved.url, moved.hostname, moved.port, moved.cores) == ("http://[fd00::7]:99", "fd00::7", 99, (1,))


def test_joining_server_serves_the_actors_in_turn_unless_told(cfg: Config) -> None:
    job = job_of("actor_llm_5", world(), cfg, Whereabouts(port=77, cores=(0, 1)), "10.0.0.9")
    assert job == Job(
        name="actor_llm_5",
        kind="actor_llm",
        replica_idx=5,
        hostname="10.0.0.9",
        port=77,
        url="http://10.0.0.9:77",
        cores=(0, 1),
        serves=1,
    )
    assert job_of("actor_llm_5", world(), cfg, Whereabouts(port=77, serves=0), "h").serves == 0


@pytest.fixture(scope="module")
def wide() -> Config:
    """Servers of eight devices."""
    sizes = ("++vllm_config.vllm_kwargs.tensor-parallel-size=4", "++vllm_config.vllm_kwargs.pipeline-parallel-size=2")
    return parse(compose("quickstart", ["output_dir=/nowhere", *sizes]))


def test_server_on_two_nodes_has_a_url_and_its_part_the_address_where_they_meet(wide: Config) -> None:
    first, second = (Whereabouts(port=77, span=read_span(2, node, "10.0.0.9:500")) for node in (0, 1))
    server = job_of("actor_llm_5", world(), wide, first, "10.0.0.9")
    part = job_of("actor_llm_part_0", world(), wide, second, "10.0.0.8")
    assert (server.url, server.num_ranks) == ("http://10.0.0.9:77", 8)
    assert (part.url, part.num_ranks, part.port) == ("tcp://10.0.0.9:500", 8, None)
    assert part.span == Span(nodes=2, node=1, host="10.0.0.9", port=500)
    placed = job_of("actor_llm_0", world(), wide, Whereabouts(span=first.span), "")
    assert (placed.url, placed.span) == (world().job("actor_llm_0").url, first.span)


def test_parts_that_cannot_be_are_refused(wide: Config) -> None:
    with pytest.raises(ConfigError, match=says("8 device(s)", "3 nodes")):
        job_of("actor_llm_5", world(), wide, Whereabouts(port=7, span=read_span(3, 0, "h:5")), "h")
    with pytest.raises(ConfigError, match="--node 2 of --nodes 2"):
        job_of("actor_llm_5", world(), wide, Whereabouts(port=7, span=read_span(2, 2, "h:5")), "h")
    with pytest.raises(ConfigError, match=says("--meet h", "HOST:PORT")):
        read_span(2, 0, "h")
    with pytest.raises(ConfigError, match=says("--job verifier", "several nodes")):
        part_name("verifier")
    assert part_name("preprocessor_llm_3") == "preprocessor_llm_part"


@pytest.mark.parametrize("name", ["actor_1", "finetune_1", "nonsense", "preprocessor_7"])
def test_only_servers_may_join(cfg: Config, name: str) -> None:
    with pytest.raises(WorldError, match=says(repr(name), "join", "actor_llm_0")):
        job_of(name, world(), cfg, Whereabouts(), "h")


def test_free_names_begin_behind_the_world(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.overwrite(Lease(name="actor_llm_2", incarnation="x", ttl_s=1))
    names = [claim_name("actor_llm", world(), store, f"i{i}", 30.0) for i in range(2)]
    assert names == ["actor_llm_3", "actor_llm_4"]
    assert store.leases()["actor_llm_4"].incarnation == "i1"


def test_run_on_loopback_is_joined_on_loopback() -> None:
    assert reach_of(world(), [("10.0.0.1", 1)]) == "127.0.0.1"
    assert reach_of(world("10.0.0.1"), [("127.0.0.1", 1)]) == "127.0.0.1"


class Refusing:
    """A store that does not know this process's password."""

    def documents(self) -> dict[str, bytes]:
        raise StoreRefusedError("redis at h:1 refuses the password: WRONGPASS")

    leases = claim = documents


def test_run_that_is_not_published_is_awaited_for_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform may start servers long before the launcher."""
    times = iter([0.0, 599.9, 600.1])
    monkeypatch.setattr(address, "time", SimpleNamespace(monotonic=lambda: next(times), sleep=lambda seconds: None))
    monkeypatch.setattr(address, "redis_store", lambda where: SimpleNamespace(documents=dict))
    with pytest.raises(DeadlineError, match="was not published within 600 s"):
        fetch_run(RedisAddress("h", 1, "x"), tmp_path)


def test_lease_outlives_four_answers_of_redis_that_do_not_come(cfg: Config) -> None:
    options = RedisStore({"host": "h", "port": 1}, "x")._client.get_connection_kwargs()
    assert options["socket_timeout"] == options["socket_connect_timeout"]
    assert 4 * options["socket_timeout"] < cfg.launcher.lease_ttl_s


def test_password_that_is_refused_ends_the_wait_at_once(
    cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "redis_store", lambda where: Refusing())
    said = says("refuses the password", "PIPELINERL_SECRET", "PIPELINERL_REDIS_PASSWORD")
    with pytest.raises(ConfigError, match=said):
        fetch_run(RedisAddress("h", 1, "x"), tmp_path, wait_s=0.0)
    with pytest.raises(ConfigError, match=said):
        entry._claim("actor_llm", world(), Refusing(), "a", cfg.launcher)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "rank", "leases"),
    [("actor_llm_5", "3", 1), ("verifier_0", "1", 1), ("finetune_0", "0", 1), ("finetune_0", "3", 0)],
)
def test_rank_in_the_environment_is_the_trainers_alone(
    name: str, rank: str, leases: int, cfg: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Platforms set it for what they start. A server that joined there got no lease, and said nothing."""
    monkeypatch.setenv("RANK", rank)
    job = Job(name=name, kind=name.rpartition("_")[0], url="http://h:1")
    store = FolderStore(tmp_path)
    own = entry.Entry(run_dir=tmp_path, cfg=cfg, world=world(), job=job, store=store, incarnation="a", is_claimed=False)
    membership = entry.take_part(own, time.monotonic, lambda: None)
    try:
        assert (membership.registration is not None) == bool(leases)
    finally:
        membership.close()
    assert status_name(name) == (name if leases else f"{name}.rank{rank}")
