"""Weight updates beside training: announced when live, held during evaluations, servers taken back."""

import threading
import time
from typing import Any

import pytest

from pipelinerl.errors import ServersExpelledError, WeightUpdateError
from pipelinerl.finetune.publish import EvaluationLease, Publisher
from pipelinerl.finetune.updates import is_push_due
from pipelinerl.records import EvaluationDone, EvaluationStarted, ProbeMissed, WeightUpdateSuccess
from pipelinerl.weights.attestor import Miss
from tests.trainer_kit import SERVER, FakeSender


class Harness:
    def __init__(self, messages: list[Any] | None = None) -> None:
        self.sender, self.announced = FakeSender(wants_scores=False), []
        self.sender.let.clear()
        self.messages = messages or []
        self.lease = EvaluationLease(self._take, clock=lambda: 100.0)
        self.publisher = Publisher(self.sender, self.announced.append, self.lease)

    def _take(self) -> list[Any]:
        taken, self.messages = self.messages, []
        return taken


@pytest.fixture
def harness() -> Any:
    harness = Harness()
    yield harness
    harness.sender.let.set()
    harness.publisher.close()


def test_update_is_announced_when_live_and_not_before(harness: Harness) -> None:
    harness.publisher.begin(3, [], [])
    assert not harness.publisher.wait_live(3, 0.05)
    assert harness.announced == []
    harness.sender.let.set()
    assert harness.publisher.wait_live(3, 10)
    (message,) = harness.announced
    assert isinstance(message, WeightUpdateSuccess)
    assert (message.version, message.servers, message.pause_ms) == (3, (SERVER,), (4.0, 6.0))
    assert harness.publisher.stats.pause_ms == 5.0


def test_next_update_waits_for_the_one_in_flight(harness: Harness) -> None:
    harness.publisher.begin(1, [], [])
    threading.Timer(0.05, harness.sender.let.set).start()
    assert harness.publisher.begin(2, [], []) > 0
    assert harness.publisher.wait_live(2, 10)
    assert [m.version for m in harness.announced] == [1, 2]


def test_returning_server_is_taken_back_and_announced(harness: Harness) -> None:
    harness.sender.let.set()
    harness.publisher.begin(1, [], [])
    assert harness.publisher.wait_live(1, 10)
    harness.sender.returning = (SERVER,)
    deadline = threading.Event()
    for _ in range(500):
        if len(harness.announced) == 2:
            break
        deadline.wait(0.02)
    assert harness.sender.readmitted == 1
    assert [m.version for m in harness.announced] == [1, 1]


def test_failing_announcement_reaches_the_training_loop() -> None:
    sender = FakeSender()

    def fail(message: Any) -> None:
        raise OSError("disk full")

    publisher = Publisher(sender, fail, EvaluationLease(lambda: []))
    publisher.begin(1, [], [])
    with pytest.raises(WeightUpdateError, match="disk full"):
        publisher.wait_live(1, 10)
    publisher.close()


def miss(is_final: bool) -> Miss:
    return Miss(server="s0", version=4, since=3, is_final=is_final, reason="0.9 nats, 0.1 are allowed")


def test_a_missed_probe_is_announced_at_once(harness: Harness) -> None:
    harness.sender.misses.append(miss(is_final=False))
    wait_for(lambda: harness.announced)
    (message,) = harness.announced
    assert isinstance(message, ProbeMissed)
    assert (message.server, message.version, message.since, message.is_final) == ("s0", 4, 3, False)
    harness.publisher.check()


def test_when_every_server_has_missed_the_run_ends_with_the_figures() -> None:
    sender, announced = FakeSender(), []
    sender.misses.append(miss(is_final=True))
    sender.is_exhausted = True
    publisher = Publisher(sender, announced.append, EvaluationLease(lambda: []))
    wait_for(lambda: publisher._error)
    with pytest.raises(ServersExpelledError, match=r"s0: version 4 0\.9 nats.*weights\.probe_tolerance"):
        publisher.check()
    assert announced[0].is_final
    publisher.close()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def started(version: int, deadline: float) -> EvaluationStarted:
    return EvaluationStarted(version=version, deadline=deadline)


def done(version: int) -> EvaluationDone:
    return EvaluationDone(version=version, success=0.0, reward=0.0, num_rollouts=1, metrics={})


@pytest.mark.parametrize(
    ("messages", "held"),
    [
        ([], False),
        ([started(1, 200.0)], True),
        ([started(1, 200.0), done(1)], False),
        ([started(1, 100.0)], False),
        ([started(1, 200.0), done(1), started(5, 150.0)], True),
        ([started(5, 150.0), done(1)], True),
        ([started(6, 150.0)], False),
    ],
)
def test_lease_on_version_6_is_held_by_another_evaluation_from_its_start_to_its_end_or_deadline(
    messages: list[Any], held: bool
) -> None:
    box = [messages, []]
    assert EvaluationLease(lambda: box.pop(0), clock=lambda: 100.0).held(6) is held


def test_push_is_due_every_interval_and_at_the_end() -> None:
    assert [step for step in range(1, 11) if is_push_due(step, 4, 10)] == [4, 8, 10]
