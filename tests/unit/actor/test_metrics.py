"""The actor's own numbers."""

from pipelinerl.actor.metrics import ActorMetrics


def test_generating_time_counts_what_follows_a_turn_with_rollouts_under_way():
    metrics = ActorMetrics(0.0)
    for now, is_generating in ((1.0, True), (3.0, True), (4.0, False), (9.0, True)):
        metrics.generating(now, is_generating)
    assert metrics.snapshot(9.0)["generating_s"] == (3.0 - 1.0) + (4.0 - 3.0)
