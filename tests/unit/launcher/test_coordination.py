"""A launcher's lease in a real store: who leads, and what the others read when it ends."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.coordination import Coordination
from pipelinerl.launcher.peers import LEADER, PeerPlan
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.streams_at_start import follow
from pipelinerl.membership.lease import LauncherNote
from pipelinerl.membership.stores import FolderStore
from pipelinerl.streams.epoch import read_epoch
from tests.says import says

WRITTEN_S = 60.0
PEERS = PeerPlan(
    rank=0,
    hosts=("host0", "host1"),
    jobs=((), ()),
    digest="d",
    mark="m",
    place="the store",
    startup_s=60.0,
    silence_s=4.0,
    away_s=60.0,
)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def coordination(store: FolderStore) -> Coordination:
    return Coordination(PEERS, store, lambda line: None)


async def lead(launcher: Coordination) -> None:
    launcher.take_part()
    assert launcher._registration is not None
    assert await asyncio.to_thread(launcher._registration.wait_until_written, WRITTEN_S)


def note_in(store: FolderStore) -> LauncherNote:
    note = store.leases()[LEADER].launcher
    assert note is not None
    return note


async def test_second_leader_of_a_run_is_refused(store: FolderStore) -> None:
    """Its run folder may be another one, so nothing but the lease keeps it from taking over streams and followers."""
    with contextlib.closing(coordination(store)) as first:
        await lead(first)
        with pytest.raises(ConfigError, match=says("launcher", "RANK=0", "running")):
            await coordination(store).find_no_rival()


async def test_leader_takes_the_place_of_a_killed_one(store: FolderStore) -> None:
    with contextlib.closing(coordination(store)) as killed:
        await lead(killed)
    await coordination(store).find_no_rival()


async def test_error_of_a_launcher_is_in_its_lease(store: FolderStore) -> None:
    with contextlib.closing(coordination(store)) as launcher:
        await lead(launcher)
        launcher._all_ended.set()
        await launcher.tell_failure(ConfigError("the folder is another run's"))
        assert (note_in(store).ending, note_in(store).reason) == ("failed", "the folder is another run's")
        await launcher.tell_failure(ConfigError("something later"))
        assert note_in(store).reason == "the folder is another run's"


@pytest.mark.parametrize("resumed", [False, True])
def test_node_that_follows_begins_an_epoch_with_its_leader_even_in_a_new_folder(tmp_path: Path, resumed: bool) -> None:
    """An actor in the new folder of a replaced node began the data anew, since it knew of no checkpoint."""
    given = ["output_dir=a", "dataset_loader=a.b", "actor.rollout_policy=a.b", "resume=checkpoint", "streams=redis"]
    world = SimpleNamespace(on_node=lambda rank: [SimpleNamespace(kind="actor")])
    plan = SimpleNamespace(config=parse(compose("base", given)), world=world, node_rank=1)
    new, gone_on = (
        LauncherNote(digest="d", secret_mark="m", marker=".launch-0", resumed=resumed) for resumed in (False, True)
    )
    with open(tmp_path / "lock", "w") as lock:
        claim = Claim(path=tmp_path, resumed=resumed, finished=False, lock=lock)
        if resumed:
            with pytest.raises(ConfigError, match=says("run folder", "node 0", "new")):
                follow(claim, plan, new)
        else:
            follow(claim, plan, new)
        assert read_epoch(tmp_path).number == 1
        follow(claim, plan, gone_on)
    assert read_epoch(tmp_path).number == 2
