"""What the actor is told of its workers."""

import multiprocessing
from pathlib import Path

import pytest

from pipelinerl.actor.worker import BEAT_S
from pipelinerl.actor.worker_pool import RolloutWorkers
from pipelinerl.config.rules.experiment import default_of
from pipelinerl.errors import DomainError
from tests.says import says


def test_heartbeats_are_many_within_the_default_time_limit() -> None:
    assert default_of("launcher.heartbeat_timeout_s") / BEAT_S >= 30


def test_worker_that_dies_while_it_loads_is_told_and_the_others_end(tmp_path: Path) -> None:
    """`close` raised an error about the dead worker's socket, and nobody read that of the domain."""
    workers = RolloutWorkers(tmp_path, "actor_0", 2, silence_s=60.0)
    try:
        (first,) = [child for child in multiprocessing.active_children() if child.name == "actor_0-worker-0"]
        first.kill()
        first.join()
        with pytest.raises(DomainError, match=says("exit code -9", "loaded the domain")):
            workers.poll(1.0)
    finally:
        workers.close()
    assert not multiprocessing.active_children()
