"""What leases of launchers mean, by hand: no store, no thread, no clock but the given numbers."""

from collections.abc import Mapping

import msgspec
import pytest

from pipelinerl.config.keys import declared
from pipelinerl.config.sections import LauncherSection
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.losses import Decision
from pipelinerl.launcher.peers import (
    LEADER,
    PeerLauncher,
    PeerPlan,
    actors_done,
    end_by_followers,
    end_by_leader,
    ending_fields,
    is_free,
    lease_name,
    living_leader,
    plan_peers,
    refusal_of,
    see_followers,
    status_lines,
    with_vanished,
)
from pipelinerl.launcher.supervisor import Ending, RoleFailure
from pipelinerl.membership.lease import LauncherNote, Lease, Observed, observe
from pipelinerl.membership.stores import decode_lease
from pipelinerl.world import Job, Node, WorldMap
from tests.says import says

LIMITS = LauncherSection(**{key.name: key.default for key in declared(LauncherSection)})
TTL_S = 10.0
SECRET = "sixteen characters"
HERE, LOST = PeerLauncher("here"), PeerLauncher("lost", "has been silent for 10 s (launcher.node_timeout_s)")


def make_peers(rank: int = 0, nodes: int = 3, servers: tuple[int, ...] = (1,), **changes) -> PeerPlan:
    """Nodes with a trainer rank each, except for those that have a server."""
    fields = {
        "rank": rank,
        "hosts": tuple(f"host{n}" for n in range(nodes)),
        "jobs": tuple((f"actor_llm_{n}" if n in servers else f"finetune_{n}",) for n in range(nodes)),
        "digest": "d",
        "mark": "m",
        "place": "results/x",
        "startup_s": 60.0,
        "silence_s": TTL_S,
        "away_s": 30.0,
    }
    return PeerPlan(**(fields | changes))


def note(**fields) -> LauncherNote:
    return LauncherNote(**({"digest": "d", "secret_mark": "m"} | fields))


def lease(rank: int, sequence: int = 1, incarnation: str | None = None, **fields) -> Lease:
    """A lease of this rank. Followers follow the incarnation `boss`."""
    fields = ({"follows": "boss"} if rank else {}) | fields
    incarnation = incarnation or ("boss" if rank == 0 else f"f{rank}")
    return Lease(
        name=lease_name(rank), incarnation=incarnation, sequence=sequence, ttl_s=TTL_S, launcher=note(**fields)
    )


def held(*leases: Lease) -> dict[str, Lease]:
    return {each.name: each for each in leases}


def looks(*seen: Mapping[str, Lease], start: Observed | None = None, every_s: float = 1.0) -> Observed:
    observed = start or Observed()
    for leases in seen:
        now = 0.0 if observed.looked_at is None else observed.looked_at + every_s
        observed = observe(observed, leases, now)
    return observed


def see(
    *leases: Lease, seconds: int = 0, before: Mapping[int, PeerLauncher] | None = None, **changes
) -> dict[int, PeerLauncher]:
    observed = looks(*[held(*leases)] * (seconds + 1))
    return see_followers(make_peers(**changes), "boss", observed, before or {})


def world_of(*jobs: Job) -> WorldMap:
    nodes = tuple(Node(rank=rank, hostname=f"host{rank}", devices=1) for rank in range(3))
    return WorldMap(accelerator="cpu", nodes=nodes, jobs=jobs, master_port=1, weight_port=2, weight_ports=2)


def job(name: str, node_rank: int) -> Job:
    return Job(name=name, kind=name.rpartition("_")[0], node_rank=node_rank)


WORLD = world_of(job("actor_llm_0", 0), job("actor_llm_1", 1), job("finetune_0", 2), job("actor_0", 2))


def plan(container: Mapping[str, object], secret: str = SECRET, world: WorldMap = WORLD) -> PeerPlan:
    return plan_peers(world, 1, container, {"PIPELINERL_SECRET": secret}, LIMITS, "results/x")


def test_plan_depends_on_everything_that_all_nodes_have_in_common() -> None:
    mine = plan({"output_dir": "/a", "seed": 1})
    assert mine.digest == plan({"seed": 1, "output_dir": "/b"}).digest
    assert mine.digest != plan({"output_dir": "/a", "seed": 2}).digest
    assert mine.digest != plan({"output_dir": "/a", "seed": 1}, world=world_of(job("finetune_0", 0))).digest
    assert mine.mark != plan({"output_dir": "/a"}, secret=SECRET + "!").mark
    assert SECRET not in repr(mine)
    assert mine.hosts == ("host0", "host1", "host2")
    assert mine.jobs == (("actor_llm_0",), ("actor_llm_1",), ("finetune_0", "actor_0"))
    assert mine.kinds_on([0, 2]) == {"actor_llm", "finetune", "actor"}
    assert mine.silence_s == LIMITS.node_timeout_s


def test_plan_gives_a_frozen_redis_the_time_to_be_found_and_restarted() -> None:
    assert plan({"output_dir": "/a"}).away_s == LIMITS.node_timeout_s
    on_redis = plan_peers(
        WORLD, 1, {"output_dir": "/a"}, {"PIPELINERL_SECRET": SECRET}, LIMITS, "redis://h:1/x", on_redis=True
    )
    assert on_redis.away_s == LIMITS.node_timeout_s + LIMITS.heartbeat_timeout_s, "also of one that it did not start"


def test_plan_without_a_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match=says("3 nodes", "PIPELINERL_SECRET", "not set", "16 characters")):
        plan({"output_dir": "/a"}, secret="short")


def test_follower_believes_a_leader_once_its_lease_was_renewed() -> None:
    seen = observe(Observed(), held(lease(0, 7)), 0.0)
    assert living_leader(seen) is None
    assert living_leader(observe(seen, held(lease(0, 7)), 1.0)) is None, "a lease that a crashed launch has left"
    found = living_leader(observe(seen, held(lease(0, 8)), 1.0))
    assert found is not None
    assert found[0].incarnation == "boss"


def test_follower_does_not_take_the_change_of_a_leader_for_a_renewal() -> None:
    seen = observe(Observed(), held(lease(0, 7, "old")), 0.0)
    seen = observe(seen, held(lease(0, 9, "new")), 1.0)
    assert living_leader(seen) is None
    assert living_leader(observe(seen, held(lease(0, 10, "new")), 2.0)) is not None


def test_launcher_lease_without_a_note_leads_nobody() -> None:
    bare = msgspec.structs.replace(lease(0), launcher=None)
    seen = observe(Observed(), held(bare), 0.0)
    assert living_leader(observe(seen, held(msgspec.structs.replace(bare, sequence=9)), 1.0)) is None


@pytest.mark.parametrize(
    "own", [None, lease(1, follows="earlier"), lease(1, ending="stopped")], ids=["none", "earlier", "ended"]
)
def test_rank_without_a_living_holder_is_free(own: Lease | None) -> None:
    leases = held(lease(0), *([own] if own else []))
    assert is_free(observe(Observed(), leases, 0.0), 1, "boss")


def test_rank_of_a_killed_launcher_is_free_when_its_lease_has_run_out() -> None:
    seen = Observed()
    for second in range(int(TTL_S) + 1):
        assert (second < 1) or not is_free(seen, 1, "boss")
        seen = observe(seen, held(lease(0, second), lease(1)), float(second))
    assert is_free(seen, 1, "boss")


def test_rank_of_a_living_launcher_is_refused() -> None:
    seen = observe(observe(Observed(), held(lease(1, 1)), 0.0), held(lease(1, 2)), 1.0)
    with pytest.raises(ConfigError, match=says("launcher", "RANK=1", "running")):
        is_free(seen, 1, "boss")


def test_leaders_place_is_free_unless_another_one_renews_its_lease() -> None:
    assert is_free(observe(Observed(), held(lease(1)), 0.0), 0)
    assert is_free(observe(Observed(), held(lease(0, ending="failed")), 0.0), 0)
    seen = observe(Observed(), held(lease(0, 7)), 0.0)
    assert not is_free(seen, 0)
    assert not is_free(observe(seen, held(lease(0, 7)), 1.0), 0), "perhaps of a killed one: look again"
    with pytest.raises(ConfigError, match=says("launcher", "RANK=0", "running")):
        is_free(observe(seen, held(lease(0, 8)), 1.0), 0)


def test_launchers_that_do_not_fit_are_told_why() -> None:
    peers = make_peers()
    assert refusal_of(peers, 1, note()) is None
    assert "node 1 (host1) was started with another configuration" in str(refusal_of(peers, 1, note(digest="x")))
    assert "is PIPELINERL_SECRET the same" in str(refusal_of(peers, 1, note(secret_mark="x", digest="x")))


def test_leader_sees_who_follows_it() -> None:
    assert see(lease(1), lease(2, follows="earlier")) == {1: HERE, 2: PeerLauncher()}
    assert see(lease(1), seconds=int(TTL_S)) == {1: LOST, 2: PeerLauncher()}
    assert see(lease(1, ending="failed", reason="why")) == {1: PeerLauncher("failed", "why"), 2: PeerLauncher()}


def test_leader_refuses_a_node_that_does_not_fit_but_not_in_a_run_under_way() -> None:
    wrong = lease(2, digest="x", ending="failed")
    assert see(wrong)[2].state == "refused"
    assert see(wrong, before={2: LOST})[2] == LOST
    assert see(lease(2, secret_mark="x"))[2] == PeerLauncher(), "a stranger ends nothing"


def test_lease_that_vanished_runs_out_like_one_that_is_not_renewed() -> None:
    observed = looks(held(lease(0), lease(1)))
    for _ in range(int(TTL_S)):
        assert see_followers(make_peers(), "boss", observed, {})[1] == HERE
        assert end_by_leader(make_peers(1), "boss", observed, 0.0) is None
        observed = looks(with_vanished(observed, {}), start=observed)
    assert see_followers(make_peers(), "boss", observed, {})[1] == LOST
    ending = end_by_leader(make_peers(1), "boss", observed, 0.0)
    assert ending is not None
    assert ending.is_cut_off


def test_vanished_leases_of_roles_are_gone() -> None:
    role = Lease(name="actor_llm_0", incarnation="i", ttl_s=TTL_S)
    assert with_vanished(looks(held(lease(0), role)), {}) == held(lease(0))


def test_run_goes_on_without_a_node_of_servers_and_takes_it_back() -> None:
    peers, gone = make_peers(), {1: LOST, 2: HERE}
    for follower in (
        LOST,
        PeerLauncher("failed", "why"),
        PeerLauncher("stopped", "SIGTERM"),
        PeerLauncher("stopped", "SIGHUP"),
    ):
        assert end_by_followers(peers, {1: follower, 2: HERE}, 0.0) is None
    assert status_lines(peers, {1: HERE, 2: HERE}, gone) == [
        "warning: node 1 (host1) has been silent for 10 s (launcher.node_timeout_s); the run goes on without "
        "actor_llm_1, and the same command there brings it back"
    ]
    assert status_lines(peers, gone, gone) == []
    assert status_lines(peers, gone, {1: HERE, 2: HERE}) == ["node 1 (host1) is back"]
    assert status_lines(peers, {}, {1: HERE, 2: PeerLauncher()}) == ["node 1 (host1) is here"]


@pytest.mark.parametrize(
    ("follower", "ending"),
    [
        (LOST, Decision(action="end", reason=f"node 2 (host2) {LOST.reason}", is_cut_off=True)),
        (PeerLauncher("failed", "why"), Decision(action="end", reason="node 2 (host2): why")),
        (PeerLauncher("stopped", "SIGTERM"), Decision(action="end", ending="stopped", reason="SIGTERM")),
        (PeerLauncher("done"), Decision(action="end", ending="done")),
        (PeerLauncher("refused", "no"), Decision(action="end", reason="no")),
    ],
)
def test_run_ends_as_a_node_with_other_roles_ends(follower: PeerLauncher, ending: Decision) -> None:
    assert end_by_followers(make_peers(), {1: HERE, 2: follower}, 0.0) == ending


def test_interrupt_on_a_node_of_servers_ends_the_run() -> None:
    ended = end_by_followers(make_peers(), {1: PeerLauncher("stopped", "SIGINT"), 2: HERE}, 0.0)
    assert ended == Decision(action="end", ending="stopped", reason="SIGINT")


def test_failure_is_told_rather_than_the_silence_of_another_node() -> None:
    ended = end_by_followers(make_peers(servers=()), {1: LOST, 2: PeerLauncher("failed", "why")}, 0.0)
    assert ended == Decision(action="end", reason="node 2 (host2): why")


def test_nodes_that_never_come_are_named_after_the_limit() -> None:
    seen = {1: PeerLauncher(), 2: HERE}
    assert end_by_followers(make_peers(), seen, 60.0) is None
    ended = end_by_followers(make_peers(), seen, 60.5)
    assert ended is not None
    assert (ended.action, ended.ending) == ("end", "failed")
    assert "no launcher from host1 within launcher.startup_timeout_s=60 s" in ended.reason
    assert "share the run folder or have streams=redis" in ended.reason


@pytest.mark.parametrize(
    ("leader", "ending"),
    [
        (lease(0), None),
        (lease(0, ending="done"), Decision(action="end", ending="done")),
        (lease(0, ending="stopped", reason="SIGINT"), Decision(action="end", ending="stopped", reason="SIGINT")),
        (lease(0, ending="failed", reason="why"), Decision(action="end", reason="node 0 (host0): why")),
    ],
)
def test_follower_ends_as_its_leader(leader: Lease, ending: Decision | None) -> None:
    assert end_by_leader(make_peers(1), "boss", looks(held(leader)), 0.0) == ending


def test_follower_of_a_leader_that_was_started_again_ends() -> None:
    ended = end_by_leader(make_peers(1), "boss", looks(held(lease(0, incarnation="new"))), 0.0)
    assert ended is not None
    assert ended.is_cut_off
    assert "node 0 (host0) was started again" in ended.reason


def test_follower_waits_for_a_store_that_is_away_only_so_long() -> None:
    observed = looks(held(lease(0)))
    assert end_by_leader(make_peers(1), "boss", observed, 29.9) is None
    ended = end_by_leader(make_peers(1), "boss", observed, 30.0)
    assert ended is not None
    assert ended.is_cut_off
    assert "node 0 (host0) is lost: the leases in results/x could not be read for 30 s" in ended.reason


def test_actors_of_this_leaders_followers_count() -> None:
    leases = [lease(1, actors_done=("actor_1",)), lease(2, actors_done=("actor_2",), follows="earlier"), lease(0)]
    assert actors_done("boss", leases) == ["actor_1"]


def test_ending_travels_in_a_lease(tmp_path) -> None:
    failure = RoleFailure(job="finetune_0", reason="exit code 1", log_path=tmp_path, error_line="x" * 9000)
    fields = ending_fields(Ending(kind="failed", failure=failure))
    assert fields["reason"].startswith("finetune_0 failed: exit code 1")
    told = lease(1, **fields)
    assert decode_lease(told.name, msgspec.json.encode(told)) == told
    assert len(msgspec.json.encode(told)) < 5000


@pytest.mark.parametrize(
    "launcher", ["1", '{"digest": 1}', '{"digest": "d"}', '{"digest": "d", "secret_mark": "m", "ending": "boom"}']
)
def test_hostile_note_is_nobodys(launcher: str) -> None:
    content = f'{{"name": "{LEADER}", "incarnation": "i", "ttl_s": 9, "launcher": {launcher}}}'
    assert decode_lease(LEADER, content.encode()) is None


def test_sixty_four_nodes_of_which_some_are_lost() -> None:
    peers = make_peers(nodes=65, servers=tuple(range(1, 60)))
    leases = held(*(lease(rank) for rank in range(65)))
    observed = looks(leases)
    for second in range(1, int(TTL_S) + 1):
        renewed = {name: msgspec.structs.replace(each, sequence=second + 1) for name, each in leases.items()}
        silent = {lease_name(rank): leases[lease_name(rank)] for rank in range(1, 8)}
        observed = looks(renewed | silent, start=observed)
    seen = see_followers(peers, "boss", observed, dict.fromkeys(peers.followers, HERE))
    assert {rank for rank, follower in seen.items() if follower.state == "lost"} == set(range(1, 8))
    assert end_by_followers(peers, seen, 1e6) is None
    assert len(status_lines(peers, dict.fromkeys(peers.followers, HERE), seen)) == 7
