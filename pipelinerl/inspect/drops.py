"""What a run did not train, and why. The one reader of the counts by reason: status, report, debug runs and `why`."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.inspect.report import read_metrics_tail
from pipelinerl.observability.catalogue import ActorMetric, PreprocessorMetric
from pipelinerl.records.drops import DropReason

HEADER = ("not trained", "attempts", "groups", "rollouts", "what happened", "what to do")


@dataclass(frozen=True, kw_only=True)
class DropCounts:
    """Counts by reason, over all actors and preprocessors."""

    attempts: Counter[str] = field(default_factory=Counter)
    """Failed ones, since the start of each actor."""
    groups: Counter[str] = field(default_factory=Counter)
    """Those that the actors gave up, since the start of each."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Those that the preprocessors dropped, since the run began."""
    published_groups: int = 0
    """Those that the actors published, for comparison, since the start of each."""


def read_drops(run_dir: Path, replicas: int = 1) -> DropCounts:
    """The counts in the newest metrics.

    Args:
        replicas: number of actors, and of preprocessors.
    """
    attempts, groups, rollouts = Counter[str](), Counter[str](), Counter[str]()
    published = 0
    for replica in range(replicas):
        suffix = f"_{replica}" if replica else ""
        actor = read_metrics_tail(run_dir, f"actor{suffix}") or {}
        preprocessor = read_metrics_tail(run_dir, f"preprocessor{suffix}") or {}
        for counts, metric, point in (
            (attempts, ActorMetric.FAILURES, actor),
            (groups, ActorMetric.GROUPS_DROPPED, actor),
            (rollouts, PreprocessorMetric.DROPPED, preprocessor),
        ):
            counts.update({reason: int(count) for reason, count in metric.found(point).items() if count})
        published += int(actor.get(ActorMetric.GROUPS) or 0)
    return DropCounts(attempts=attempts, groups=groups, rollouts=rollouts, published_groups=published)


def drops_table(drops: DropCounts) -> list[tuple[str, ...]]:
    """One row of texts per reason that occurred, in the order of `DropReason`, as `HEADER` names them."""
    columns = (drops.attempts, drops.groups, drops.rollouts)
    occurred = {word for column in columns for word in column}
    words: list[str] = [reason for reason in DropReason if reason in occurred]
    words += sorted(occurred.difference(DropReason))  # of an older version
    return [(str(word), *(str(column[word] or "") for column in columns), *_advice(word)) for word in words]


def _advice(word: str) -> tuple[str, str]:
    reason = DropReason.of(word)
    return (reason.text, reason.fix) if reason is not None else ("", "")
