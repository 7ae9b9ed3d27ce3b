"""What a run did not train, and why: the one table that `status` and the report show, from the newest metrics."""

from collections import Counter
from pathlib import Path

from pipelinerl.inspect.report import read_metrics_tail
from pipelinerl.observability.catalogue import ActorMetric, PreprocessorMetric
from pipelinerl.records.drops import DropReason

HEADER = ("not trained", "attempts", "groups", "rollouts", "what happened", "what to do")


def drops_table(run_dir: Path, replicas: int = 1) -> list[tuple[str, ...]]:
    """One row of texts per reason that occurred, in the order of `DropReason`, as `HEADER` names them.

    Attempts and groups count since the start of each actor, rollouts since the run began.

    Args:
        replicas: number of actors, and of preprocessors.
    """
    counts = {metric: Counter[str]() for metric in (ActorMetric.FAILURES, ActorMetric.GROUPS_DROPPED)}
    rollouts = Counter[str]()
    for replica in range(replicas):
        suffix = f"_{replica}" if replica else ""
        actor = read_metrics_tail(run_dir, f"actor{suffix}") or {}
        for metric, count in counts.items():
            count.update({reason: int(n) for reason, n in metric.found(actor).items()})
        found = PreprocessorMetric.DROPPED.found(read_metrics_tail(run_dir, f"preprocessor{suffix}") or {})
        rollouts.update({reason: int(n) for reason, n in found.items()})
    columns = (*counts.values(), rollouts)
    occurred = {word for column in columns for word, count in column.items() if count}
    words: list[str] = [reason for reason in DropReason if reason in occurred]
    words += sorted(occurred.difference(DropReason))  # of an older version
    return [(str(word), *(str(column[word] or "") for column in columns), *_advice(word)) for word in words]


def _advice(word: str) -> tuple[str, str]:
    reason = DropReason.of(word)
    return (reason.text, reason.fix) if reason is not None else ("", "")
