"""A role that has only the run's redis address gets configuration, world, streams and leases from there."""

import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.config.load import compose, load_run, to_container
from pipelinerl.errors import DeadlineError
from pipelinerl.membership.address import RedisAddress, address_of, fetch_run, publish_run
from pipelinerl.membership.entry import enter, first_lease
from pipelinerl.membership.joining import Whereabouts
from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader, open_writer
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node
from tests.says import says


@pytest.fixture
def address(tmp_path: Path, redis_options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch) -> RedisAddress:
    """Of a run in `tmp_path/run` whose launcher has not published it yet."""
    if redis_options is None:
        pytest.skip("needs redis-server")
    monkeypatch.setenv("PIPELINERL_REDIS_PASSWORD", redis_options["password"])
    for name in ("NO_PROXY", "no_proxy"):  # a role adds to it
        monkeypatch.setenv(name, ".corp")
    run_dir = tmp_path / "run"
    own = ["streams=redis", "streams.host=127.0.0.1", f"streams.port={redis_options['port']}", "streams.external=true"]
    cfg = to_container(compose("quickstart", [f"output_dir={run_dir}", *own]))
    (run_dir / "conf").mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(cfg), run_dir / "conf" / "config.yaml")
    WorldMap(
        accelerator="cpu",
        nodes=(Node(rank=0, hostname="127.0.0.1", devices=2),),
        jobs=(
            Job(name="actor_llm_0", kind="actor_llm", url="http://127.0.0.1:1", port=1),
            Job(name="actor_0", kind="actor", hostname="node-7"),
        ),
        master_port=1,
        weight_port=2,
        weight_ports=1,
    ).save(run_dir)
    found = address_of(load_run(run_dir), run_dir)
    assert isinstance(found, RedisAddress)
    return found


def test_role_on_another_machine_shares_streams_and_leases(address: RedisAddress, tmp_path: Path) -> None:
    publish_run(address, tmp_path / "run")
    entry = enter(str(address), tmp_path / "elsewhere", "actor_llm", Whereabouts(port=77))
    assert (entry.job.name, entry.job.url) == ("actor_llm_1", "http://127.0.0.1:77")
    assert entry.world == WorldMap.load(tmp_path / "run")
    assert address_of(entry.cfg, entry.run_dir) == address
    entry.store.renew(first_lease(entry))
    assert entry.store.leases()["actor_llm_1"].url == "http://127.0.0.1:77"
    backend_from_config(load_run(tmp_path / "run"), tmp_path / "run")
    with open_writer(SingleStreamSpec(tmp_path / "run", "topic"), Job) as writer:
        writer.write(entry.job)
    backend_from_config(entry.cfg, entry.run_dir)
    with open_reader(SingleStreamSpec(entry.run_dir, "topic"), Job, name=None) as reader:
        assert reader.read_all() == [(0, entry.job)]


def test_role_reaches_the_hosts_of_the_run_without_a_proxy(address: RedisAddress, tmp_path: Path) -> None:
    publish_run(address, tmp_path / "run")
    enter(str(address), tmp_path / "elsewhere", "actor_llm", Whereabouts(port=77))
    assert {os.environ[name] for name in ("NO_PROXY", "no_proxy")} == {".corp,localhost,127.0.0.1,::1,node-7"}


def test_second_start_uses_the_same_folder_and_another_name(address: RedisAddress, tmp_path: Path) -> None:
    publish_run(address, tmp_path / "run")
    names = [enter(str(address), tmp_path / "elsewhere", "actor_llm", Whereabouts(port=7)).job.name for _ in range(2)]
    assert names == ["actor_llm_1", "actor_llm_2"]


def test_run_that_is_never_published_is_said(address: RedisAddress, tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=says("not published", "0 s", "no such run")):
        fetch_run(RedisAddress(address.host, address.port, "another"), tmp_path / "x", wait_s=0)
