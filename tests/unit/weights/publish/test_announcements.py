"""What the trainer tells of its servers."""

from typing import Any, cast

import pytest

from pipelinerl.errors import ServersExpelledError
from pipelinerl.records import ProbeMissed, ProbePassed, WeightUpdateSuccess
from pipelinerl.weights.protocol import WeightUpdateAnswer
from pipelinerl.weights.publish.announcements import Announcements
from pipelinerl.weights.publish.servers import ServerClient, UpdateOutcome
from pipelinerl.world import Job
from tests.says import says


def client(name: str, serves: int | None, pause_ms: float = 0.0, seconds: float = 0.0) -> ServerClient:
    made = ServerClient(Job(name=name, kind="actor_llm"), cast(Any, None), serves=serves)
    if serves is not None:
        answer = WeightUpdateAnswer(version=serves, pause_ms=pause_ms, swap_ms=0.0, transfer_ms=0.0, prepare_ms=0.0)
        made.last = UpdateOutcome(version=serves, num_bytes=1, seconds=seconds, answer=answer)
    return made


def miss(is_final: bool) -> ProbeMissed:
    return ProbeMissed(server="s0", version=4, since=3, is_final=is_final, reason="0.9 nats, 0.1 are allowed")


def test_each_server_is_told_with_the_version_it_serves_and_only_changes_are_told() -> None:
    written: list[Any] = []
    announcements = Announcements(written.append)
    assert not announcements.announce([client("s0", None), client("s1", None)], {})
    clients = [client("s0", 7, 4.0, 0.5), client("s1", 6, 1.0, 9.0), client("s2", None), client("s3", 7, 6.0, 0.25)]
    assert announcements.announce(clients, {})
    assert not announcements.announce(clients, {})
    (message,) = written
    assert isinstance(message, WeightUpdateSuccess)
    assert (message.version, message.servers, message.older) == (7, ("s0", "s3"), {"s1": 6})
    assert (message.pause_ms, message.transfer_ms) == ((4.0, 6.0), 500.0)
    assert (announcements.stats.version, announcements.stats.servers, announcements.stats.pause_ms) == (
        7,
        ("s0", "s3"),
        5.0,
    )


def test_figures_of_a_version_are_there_when_it_counts_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer waits in another thread until a version is live, and then reads its figures."""
    seen: list[int] = []

    def watched(announcements: Announcements, name: str, value: Any) -> None:
        object.__setattr__(announcements, name, value)
        if getattr(announcements, "serving", None) and announcements.count_live(7):
            seen.append(announcements.stats.version)

    monkeypatch.setattr(Announcements, "__setattr__", watched)
    Announcements(lambda _: None).announce([client("s0", 7)], {})
    assert seen
    assert set(seen) == {7}


def test_what_is_verified_of_servers_is_announced_with_their_versions_and_alone_when_only_that_changes() -> None:
    written: list[Any] = []
    announcements, clients = Announcements(written.append), [client("s0", 7), client("s1", 7), client("s2", None)]
    verified = {"s0": 6, "s1": -1, "s2": 7}
    assert announcements.announce(clients, verified)
    assert written[-1].proved == {"s0": 6, "s1": -1}
    assert not announcements.announce(clients, verified)
    assert announcements.announce(clients, verified | {"s1": 7})
    assert isinstance(written[-1], ProbePassed)
    assert written[-1].proved == {"s1": 7}
    assert announcements.announce([client("s0", 8), *clients[1:]], verified | {"s1": 7})
    assert written[-1].proved == {"s0": 6, "s1": 7}
    assert len(written) == 3


def test_when_nobody_serves_the_newest_version_stays() -> None:
    written: list[Any] = []
    announcements = Announcements(written.append)
    announcements.announce([client("s0", 7)], {})
    announcements.announce([client("s0", None)], {})
    assert (written[-1].version, written[-1].servers, announcements.stats.servers) == (7, (), ())


def test_missed_probe_is_told_and_the_server_is_named_again_when_it_serves_the_same_version_anew() -> None:
    written: list[Any] = []
    announcements = Announcements(written.append)
    announcements.announce([client("s0", 4)], {})
    announcements.missed(miss(is_final=False), [client("s0", None)])
    told = written[-1]
    assert isinstance(told, ProbeMissed)
    assert (told.server, told.version, told.since, told.is_final) == ("s0", 4, 3, False)
    assert announcements.announce([client("s0", 4)], {})


def test_when_every_server_has_missed_the_run_ends_with_the_figures() -> None:
    written: list[Any] = []
    expelled = client("s0", None)
    expelled.miss(is_final=True)
    with pytest.raises(ServersExpelledError, match=says("s0", "version 4", "0.9 nats", "weights.probe_tolerance")):
        Announcements(written.append).missed(miss(is_final=True), [expelled])
    assert written[0].is_final
