"""What an observer concludes from leases, by hand: no thread, no clock but the given numbers."""

from pipelinerl.membership.lease import (
    PROTOCOL,
    Lease,
    LiveServer,
    Observed,
    count_parts,
    observe,
    servers_now,
)
from pipelinerl.world import Job

PLACED = (Job(name="actor_llm_0", kind="actor_llm", url="http://a:1"), Job(name="actor_0", kind="actor"))


def lease(name: str = "actor_llm_0", sequence: int = 1, **fields) -> Lease:
    values = {"incarnation": "i", "ttl_s": 10.0, "state": "ready", "url": "http://a:1"} | fields
    return Lease(name=name, sequence=sequence, **values)


def looks(*seen: tuple[float, dict[str, Lease]]) -> Observed:
    observed = Observed()
    for now, leases in seen:
        observed = observe(observed, leases, now)
    return observed


def every_second(start: float, seconds: int, held: dict[str, Lease]) -> list[tuple[float, dict[str, Lease]]]:
    return [(start + i, held) for i in range(seconds + 1)]


def test_lease_that_is_not_renewed_runs_out_after_its_length() -> None:
    held = {"actor_llm_0": lease()}
    assert looks(*every_second(100.0, 9, held)).alive() == held
    assert looks(*every_second(100.0, 10, held)).alive() == {}


def test_lease_is_deleted_when_it_was_not_renewed_for_ten_times_its_length() -> None:
    held = {"actor_llm_0": lease()}
    assert looks(*every_second(100.0, 99, held)).forgotten() == []
    assert looks(*every_second(100.0, 100, held)).forgotten() == [lease()]


def test_lease_that_is_renewed_holds_for_ever() -> None:
    observed = looks(*[(100.0 + 5 * i, {"actor_llm_0": lease(sequence=i)}) for i in range(40)])
    assert observed.silent_s("actor_llm_0") == 0.0


def test_restarted_role_has_a_new_lease_whatever_its_sequence() -> None:
    before = every_second(100.0, 9, {"actor_llm_0": lease(sequence=7)})
    after = [(110.0, {"actor_llm_0": lease(sequence=7, incarnation="another")})]
    assert looks(*before, *after).silent_s("actor_llm_0") == 0.0


def test_no_lease_runs_out_while_nobody_can_look() -> None:
    held = {"actor_llm_0": lease()}
    observed = looks((100.0, held), (100_000.0, held))
    assert observed.silent_s("actor_llm_0") == 2.0
    assert observed.alive() == held


def test_clock_that_goes_back_counts_nothing() -> None:
    held = {"actor_llm_0": lease()}
    assert looks((100.0, held), (50.0, held)).silent_s("actor_llm_0") == 0.0


def test_new_observer_gives_every_lease_its_whole_length() -> None:
    assert looks((5.0, {"actor_llm_0": lease(sequence=99)})).alive().keys() == {"actor_llm_0"}


def test_old_leases_are_forgotten_long_after_they_ran_out() -> None:
    held = {"actor_llm_0": lease()}
    assert looks(*every_second(0.0, 99, held)).forgotten() == []
    assert looks(*every_second(0.0, 100, held)).forgotten() == [held["actor_llm_0"]]


def test_placed_server_counts_until_its_lease_was_seen() -> None:
    assert servers_now(PLACED, Observed(), "actor_llm") == {"actor_llm_0": LiveServer(PLACED[0])}
    starting = looks((0.0, {"actor_llm_0": lease(state="starting")}))
    assert servers_now(PLACED, starting, "actor_llm") == {}
    gone = looks((0.0, {"actor_llm_0": lease()}), (1.0, {}))
    assert servers_now(PLACED, gone, "actor_llm") == {}


def test_joined_server_has_the_address_of_its_lease() -> None:
    observed = looks((0.0, {"actor_llm_7": lease("actor_llm_7", url="http://[::2]:9", serves=1, num_ranks=2)}))
    job = Job(
        name="actor_llm_7", kind="actor_llm", replica_idx=7, hostname="::2", url="http://[::2]:9", num_ranks=2, serves=1
    )
    assert servers_now((), observed, "actor_llm") == {"actor_llm_7": LiveServer(job)}
    assert servers_now((), observed, "preprocessor_llm") == {}


def test_server_takes_as_many_rollouts_as_its_lease_says() -> None:
    servers = servers_now(PLACED, looks((0.0, {"actor_llm_0": lease(capacity=40)})), "actor_llm")
    assert servers["actor_llm_0"].capacity == 40


def test_parts_of_a_server_are_counted_while_they_are_ready() -> None:
    own = [lease(f"actor_llm_part_{i}", url="tcp://a:5", state=state) for i, state in enumerate(("ready", "starting"))]
    other = lease("actor_llm_part_2", url="tcp://b:5")
    server = lease("actor_llm_0", url="tcp://a:5")
    observed = looks((0.0, {each.name: each for each in (*own, other, server)}))
    assert count_parts(observed, "tcp://a:5") == 1
    assert servers_now((), observed, "actor_llm").keys() == {"actor_llm_0"}


def test_draining_server_is_named_as_such_and_one_of_another_protocol_is_not_used() -> None:
    other = lease("actor_llm_1", protocol=PROTOCOL + 1)
    observed = looks((0.0, {"actor_llm_0": lease(state="draining"), "actor_llm_1": other}))
    servers = servers_now(PLACED, observed, "actor_llm")
    assert {name: server.is_draining for name, server in servers.items()} == {"actor_llm_0": True}
