"""The streams that a run keeps on a redis that it did not start: who deletes them, and when."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

import pytest
import redis

from pipelinerl.config.load import load_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launcher import streams_at_start
from pipelinerl.launcher.commands import role_command
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.membership.lease import LauncherNote
from pipelinerl.records import SamplesProcessed, TrainerMessage, topics
from pipelinerl.streams import (
    SingleStreamSpec,
    backend_from_config,
    get_streams_backend,
    open_writer,
)
from pipelinerl.streams.epoch import read_epoch
from pipelinerl.world import Job, Node, WorldMap
from pipelinerl.world.process import process_restored
from tests.run_folder import write_config
from tests.says import says


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_config(tmp_path)
    return tmp_path


@pytest.fixture
def external(run: Path, redis_options: dict[str, Any] | None) -> Iterator[Config]:
    """The run's configuration with its streams on a redis that it did not start, with one record in each of two."""
    if redis_options is None:
        pytest.skip("needs redis-server")
    config = load_run(run)
    at = {"backend": "redis", "external": True, "host": "127.0.0.1", "port": redis_options["port"]}
    config = config.model_copy(update={"streams": config.streams.model_copy(update=at)})
    with process_restored(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINERL_REDIS_PASSWORD", redis_options["password"])
        patch.setattr(streams_at_start, "write_account", lambda run_dir, lost: None)
        patch.setattr(streams_at_start, "look_into", lambda run_dir: nullcontext(backend_from_config(config, run_dir)))
        backend_from_config(config, run)
        for partition in range(2):
            with open_writer(SingleStreamSpec(run, topics.TRAINER, 0, partition), TrainerMessage) as trainer:
                trainer.write(SamplesProcessed(samples_processed=1, step=1))
        yield config


def streams_of(run: Path, config: Config) -> int:
    backend_from_config(config, run)
    return len(get_streams_backend().specs(run))


@pytest.mark.parametrize("owns_external", [False, True])
def test_streams_on_an_external_redis_are_deleted_by_one_node_only(
    run: Path, external: Config, owns_external: bool
) -> None:
    """A node that follows begins its epoch after the leader's roles have begun to write the new streams."""
    streams_at_start.begin_epoch(run, external, lambda line: None, owns_external=owns_external)
    assert streams_of(run, external) == (0 if owns_external else 2)
    assert read_epoch(run).number == 2


def claim_of(run: Path, lock: IO[str], *, resumed: bool = False) -> Claim:
    return Claim(path=run, resumed=resumed, finished=False, lock=lock)


def plan_of(config: Config, *kinds: str) -> RunPlan:
    """A world whose node 0 has jobs of these kinds."""
    node = Node(rank=0, hostname="127.0.0.1", devices=1)
    jobs = tuple(Job(name=f"{kind}_0", kind=kind) for kind in kinds)
    world = WorldMap(accelerator="cpu", nodes=(node,), jobs=jobs, master_port=1, weight_port=2, weight_ports=1)
    return RunPlan(
        config=config,
        container={},
        overrides=(),
        command_of=role_command,
        node_rank=0,
        started=0.0,
        world=world,
        jobs=jobs,
        commands=(),
    )


def test_new_run_does_not_go_on_with_the_streams_that_an_earlier_one_left_on_redis(run: Path, external: Config) -> None:
    """With force_restart the folder was emptied, and its new run read the end of the old one and was done at once."""
    forced = external.model_copy(update={"force_restart": True})
    with open(run / "lock", "w") as lock:
        claim = claim_of(run, lock)
        with pytest.raises(ConfigError, match=says("streams of an earlier run", "force_restart=true")):
            streams_at_start.take(claim, plan_of(external, "actor"))
        assert streams_at_start.take(claim_of(run, lock, resumed=True), plan_of(external, "actor"))
        assert streams_at_start.take(claim, plan_of(external, "actor_llm")), (
            "those that have streams are told by the lease"
        )
        assert streams_of(run, external) == 2
        assert not streams_at_start.take(claim, plan_of(forced, "actor"))
        assert streams_of(run, external) == 0
        assert not streams_at_start.take(claim, plan_of(external, "actor"))


def test_redis_that_would_delete_streams_is_refused_before_anything_is_deleted(
    run: Path, external: Config, redis_options: dict[str, Any]
) -> None:
    forced = external.model_copy(update={"force_restart": True})
    with redis.Redis(port=redis_options["port"], password=redis_options["password"]) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with (
                open(run / "lock", "w") as lock,
                pytest.raises(ConfigError, match=says("maxmemory-policy", "allkeys-lru", "noeviction")),
            ):
                streams_at_start.take(claim_of(run, lock), plan_of(forced, "actor"))
            assert streams_of(run, external) == 2
        finally:
            server.config_set("maxmemory-policy", "noeviction")


def test_node_that_follows_in_a_new_folder_does_not_go_on_with_old_streams(run: Path, external: Config) -> None:
    leader = LauncherNote(digest="d", secret_mark="m", marker=".launch-0", old_streams=True)
    with open(run / "lock", "w") as lock:
        streams_at_start.follow(claim_of(run, lock), plan_of(external, "actor_llm"), leader)
        with pytest.raises(ConfigError, match="on this node it is new, but redis"):
            streams_at_start.follow(claim_of(run, lock), plan_of(external, "finetune"), leader)
