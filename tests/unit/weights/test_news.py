"""What the trainer tells of its servers."""

from typing import Any, cast

import pytest

from pipelinerl.errors import ServersExpelledError
from pipelinerl.records import ProbeMissed, ProbePassed, WeightUpdateSuccess
from pipelinerl.weights.attestor import Miss
from pipelinerl.weights.member import Member, UpdateOutcome
from pipelinerl.weights.news import News
from pipelinerl.weights.protocol import WeightUpdateAnswer
from pipelinerl.world import Job


def member(name: str, serves: int | None, pause_ms: float = 0.0, seconds: float = 0.0) -> Member:
    made = Member(Job(name=name, kind="actor_llm"), cast(Any, None), serves=serves)
    if serves is not None:
        answer = WeightUpdateAnswer(version=serves, pause_ms=pause_ms, swap_ms=0.0, transfer_ms=0.0, prepare_ms=0.0)
        made.last = UpdateOutcome(version=serves, num_bytes=1, seconds=seconds, answer=answer)
    return made


def miss(is_final: bool) -> Miss:
    return Miss(server="s0", version=4, since=3, is_final=is_final, reason="0.9 nats, 0.1 are allowed")


def test_each_server_is_told_with_the_version_it_serves_and_only_changes_are_told() -> None:
    written: list[Any] = []
    news = News(written.append)
    assert not news.tell([member("s0", None), member("s1", None)], {})
    members = [member("s0", 7, 4.0, 0.5), member("s1", 6, 1.0, 9.0), member("s2", None), member("s3", 7, 6.0, 0.25)]
    assert news.tell(members, {})
    assert not news.tell(members, {})
    (message,) = written
    assert isinstance(message, WeightUpdateSuccess)
    assert (message.version, message.servers, message.older) == (7, ("s0", "s3"), {"s1": 6})
    assert (message.pause_ms, message.transfer_ms) == ((4.0, 6.0), 500.0)
    assert (news.stats.version, news.stats.servers, news.stats.pause_ms) == (7, ("s0", "s3"), 5.0)


def test_what_servers_have_proved_is_told_with_their_versions_and_alone_when_only_that_changes() -> None:
    written: list[Any] = []
    news, members = News(written.append), [member("s0", 7), member("s1", 7), member("s2", None)]
    proved = {"s0": 6, "s1": -1, "s2": 7}
    assert news.tell(members, proved)
    assert written[-1].proved == {"s0": 6, "s1": -1}
    assert not news.tell(members, proved)
    assert news.tell(members, proved | {"s1": 7})
    assert isinstance(written[-1], ProbePassed)
    assert written[-1].proved == {"s1": 7}
    assert news.tell([member("s0", 8), *members[1:]], proved | {"s1": 7})
    assert written[-1].proved == {"s0": 6, "s1": 7}
    assert len(written) == 3


def test_when_nobody_serves_the_newest_version_stays() -> None:
    written: list[Any] = []
    news = News(written.append)
    news.tell([member("s0", 7)], {})
    news.tell([member("s0", None)], {})
    assert (written[-1].version, written[-1].servers, news.stats.servers) == (7, (), ())


def test_missed_probe_is_told_and_the_server_is_named_again_when_it_serves_the_same_version_anew() -> None:
    written: list[Any] = []
    news = News(written.append)
    news.tell([member("s0", 4)], {})
    news.missed(miss(is_final=False), [member("s0", None)])
    told = written[-1]
    assert isinstance(told, ProbeMissed)
    assert (told.server, told.version, told.since, told.is_final) == ("s0", 4, 3, False)
    assert news.tell([member("s0", 4)], {})


def test_when_every_server_has_missed_the_run_ends_with_the_figures() -> None:
    written: list[Any] = []
    expelled = member("s0", None)
    expelled.miss(is_final=True)
    with pytest.raises(ServersExpelledError, match=r"s0: version 4 0\.9 nats.*weights\.probe_tolerance"):
        News(written.append).missed(miss(is_final=True), [expelled])
    assert written[0].is_final
