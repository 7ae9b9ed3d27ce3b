"""The actor's own numbers."""

import msgspec
import pytest

from pipelinerl.actor.messages import Sampling
from pipelinerl.actor.metrics import ActorMetrics, evaluation_metrics
from pipelinerl.actor.role import test_problems
from pipelinerl.config.load import compose, parse
from pipelinerl.records import EvaluationDone, Rollout
from pipelinerl.records.check import LARGEST_NUMBER


def test_generating_time_counts_what_follows_a_turn_with_rollouts_under_way():
    metrics = ActorMetrics(0.0)
    for now, is_generating in ((1.0, True), (3.0, True), (4.0, False), (9.0, True)):
        metrics.generating(now, is_generating)
    assert metrics.snapshot(9.0)["generating_s"] == (3.0 - 1.0) + (4.0 - 3.0)


def test_workers_busy_is_the_mean_of_what_each_worker_said_last():
    metrics = ActorMetrics(0.0)
    assert metrics.snapshot(1.0)["workers_busy"] == 0.0
    for worker, busy in ((0, 0.9), (1, 0.2), (0, 1.0)):
        metrics.sampling(worker, Sampling(tokens=0, longest=0, ended=0, busy=busy))
    assert metrics.snapshot(2.0)["workers_busy"] == pytest.approx(0.6)
    assert metrics.snapshot(3.0)["workers_busy"] == pytest.approx(0.6)


def test_slots_held_is_the_mean_share_since_the_point_before():
    """Half of the slots for 2 s and none for 6 s; then a quarter for the whole of 4 s."""
    metrics = ActorMetrics(0.0)
    for now, share in ((1.0, 0.5), (3.0, 0.0), (8.0, 0.25)):
        metrics.generating(now, True, share)
    assert metrics.snapshot(8.0)["slots_held"] == pytest.approx(0.5 * 2 / 8)
    metrics.generating(12.0, True, 0.0)
    assert metrics.snapshot(12.0)["slots_held"] == pytest.approx(0.25)


def rollout(**metrics: float) -> Rollout:
    return Rollout(attempt=0, reward=0.0, sequences=(), metrics=metrics, latency_s=metrics["success"], num_llm_calls=1)


def test_several_domains_have_means_of_their_own() -> None:
    metrics = ActorMetrics(0.0)
    metrics.rollouts([rollout(success=1.0), rollout(success=0.0)], "math")
    assert not [name for name in metrics.snapshot(1.0) if "/" in name]
    metrics.rollouts([rollout(success=1.0, turns=4.0)], "game")
    values = metrics.snapshot(2.0)
    assert (values["success"], values["turns"]) == (pytest.approx(2 / 3), 4.0)
    assert (values["math/success"], values["math/latency_s"]) == (0.5, 0.5)
    assert (values["game/success"], values["game/turns"]) == (1.0, 4.0)
    assert "math/turns" not in values


def test_metric_of_a_domain_takes_no_other_numbers_place(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ActorMetrics(0.0)
    taken = {"rollouts": 7.0, "latency_s": 7.0, "step": 7.0, "time": 7.0, "version": 7.0, "math/success": 7.0}
    for subset in ("math", "game"):
        metrics.rollouts([rollout(success=1.0, **taken)], subset)
    values = metrics.snapshot(1.0)
    assert (values["rollouts"], values["latency_s"], values["math/latency_s"], values["math/success"]) == (2, 1, 1, 1)
    assert not {"step", "time", "version"} & set(values)
    assert caplog.text.count("event=domain_metric_left_out") == 1


def test_metric_of_a_domain_is_not_the_spread_of_another() -> None:
    metrics = ActorMetrics(0.0)
    metrics.rollouts([rollout(success=1.0, turns=2.0, turns_max=8.0), rollout(success=1.0, turns=4.0)], "math")
    assert metrics.snapshot(1.0)["turns_max"] == 8.0


def test_evaluation_of_a_data_set_without_a_name_is_not_taken_for_the_share_that_is_complete() -> None:
    done = EvaluationDone(
        version=3,
        success=0.5,
        reward=0.5,
        num_rollouts=2,
        metrics={"complete": 1.0, "/success": 0.5, "a/b:c@d/success": 0.25},
        outcomes={},
        timestamp=0.0,
    )
    values = evaluation_metrics(done)
    assert (values["eval/complete"], values["eval//success"], values["eval/a/b:c@d/success"]) == (1.0, 0.5, 0.25)


def test_prefix_hit_rate_is_of_tokens_not_of_rollouts() -> None:
    metrics = ActorMetrics(0.0)
    one = msgspec.structs.replace(rollout(success=1.0), sent_tokens=300, cached_tokens=60)
    other = msgspec.structs.replace(rollout(success=1.0), sent_tokens=100, cached_tokens=100)
    metrics.rollouts([one, other], "math")
    assert metrics.snapshot(1.0)["prefix_hit_rate"] == pytest.approx((60 + 100) / (300 + 100))


def test_domains_with_test_sets_of_one_name_are_evaluated_apart() -> None:
    names = ["countdown", "counting"]
    domains = [
        f"{{name: {name}, weight: 1, rollout_policy: a.b, dataset_loader: pipelinerl.domains.{name}.load_problems,"
        " dataset_loader_params: {num_test_problems: 3}, train_dataset_names: [train], test_dataset_names: [test]}"
        for name in names
    ]
    required = ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b", "eval.max_problems=2"]
    cfg = parse(compose("base", [*required, f"domains=[{','.join(domains)}]"]))
    assert [(item.domain, item.dataset) for item in test_problems(cfg)] == [
        (0, "countdown/test"),
        (0, "countdown/test"),
        (1, "counting/test"),
        (1, "counting/test"),
    ]


def test_spread_of_the_largest_metrics_is_finite() -> None:
    """The square of 1e300 is no float: it ended the actor."""
    metrics = ActorMetrics(0.0)
    for value in (LARGEST_NUMBER, -LARGEST_NUMBER):
        metrics.rollouts([rollout(reward=value, success=0.0)] * 512, "d")
    values = metrics.snapshot(1.0)
    assert (values["reward"], values["reward_std"]) == (0.0, pytest.approx(LARGEST_NUMBER))  # type: ignore[index]
