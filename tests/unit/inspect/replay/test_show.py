"""What a replay prints about a step."""

from pipelinerl.inspect.replay.compare import StepComparison
from pipelinerl.inspect.replay.show import verdict


def test_verdict_names_eight_differences_of_a_kind_and_counts_the_rest() -> None:
    metrics = {f"metric_{i}": (1.0, 2.0) for i in range(10)}
    found = StepComparison(metrics=metrics, metrics_compared=12, sequences={f"0-{i}/0/0" for i in range(9)})
    lines = verdict(found)
    assert lines[:2] == ["NOT EQUAL to the run", "  2 of 12 metrics bit-equal"]
    assert lines[2:10] == [f"    metric_{i}: recorded 1.0, replayed 2.0" for i in range(8)]
    assert lines[10:] == ["  sequences that differ: " + ", ".join(f"0-{i}/0/0" for i in range(8)) + " and 1 more"]
