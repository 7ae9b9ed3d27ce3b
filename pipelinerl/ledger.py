"""`python -m pipelinerl.ledger RUN`: what became of every dispatched rollout.

The ledger is derived from the topics and owns nothing: `actor` says which groups were published or dropped,
`preprocessor` which rollouts were packed for which step or dropped and why, `trainer` how many steps are trained.
A rollout trained twice, or one of a published group that is neither trained, dropped nor still ahead of the trainer,
is an error that the command reports with a non-zero exit.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipelinerl.records import ActorRecord, GroupDropped, PreprocessorProgress, SamplesProcessed, TrainerMessage, topics


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One rollout, `sample_id` = `<group_id>/<attempt>`; `attempt` is `*` for a group that never came to be."""

    sample_id: str
    outcome: str
    """trained, packed (its step is not done yet), dropped, or queued (published by the actor, not packed yet)."""
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    entries: tuple[LedgerEntry, ...]
    violations: tuple[str, ...]
    """Samples trained twice, trained though dropped, or packed without having been published."""

    def counts(self) -> dict[str, int]:
        """Rollouts by outcome; drops by reason."""
        return dict(Counter(f"dropped/{e.reason}" if e.outcome == "dropped" else e.outcome for e in self.entries))


def build(actor: Iterable[ActorRecord], preprocessor: Iterable[PreprocessorProgress], steps_trained: int) -> Ledger:
    """Joins the records of the three topics; pure."""
    published: dict[str, LedgerEntry] = {}
    violations: list[str] = []
    dropped_groups = []
    for record in actor:
        if isinstance(record, GroupDropped):
            dropped_groups.append(
                LedgerEntry(sample_id=f"{record.group_id}/*", outcome="dropped", reason=record.reason)
            )
            continue
        for rollout in record.rollouts:
            sample_id = f"{record.group_id}/{rollout.attempt}"
            if sample_id in published:
                violations.append(f"{sample_id} was published twice")
            published[sample_id] = LedgerEntry(sample_id=sample_id, outcome="queued")
    settled: dict[str, LedgerEntry] = {}
    for progress in preprocessor:
        step = progress.step - 1
        outcome = "trained" if step < steps_trained else "packed"
        events = [LedgerEntry(sample_id=i, outcome=outcome, step=step) for i in progress.packed_sample_ids]
        events += [LedgerEntry(sample_id=i, outcome="dropped", reason=r) for i, r in progress.dropped_sample_ids]
        for entry in events:
            earlier = settled.get(entry.sample_id)
            if earlier is not None and (earlier.outcome, earlier.step) != (entry.outcome, entry.step):
                violations.append(f"{entry.sample_id} was {_say(earlier)} and {_say(entry)}")
            if entry.sample_id not in published:
                violations.append(f"{entry.sample_id} was {_say(entry)} but never published")
            settled[entry.sample_id] = entry
    return Ledger(entries=(*dropped_groups, *(published | settled).values()), violations=tuple(violations))


def read(run_dir: Path) -> Ledger:
    """The ledger of a run folder, finished or running, from its streams."""
    from pipelinerl.config.load import load_run
    from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader

    cfg = load_run(run_dir)
    backend_from_config(cfg, run_dir)

    def records(topic: str, record_type: object, instance: int = 0) -> list:
        spec = SingleStreamSpec(exp_path=run_dir, topic=topic, instance=instance)
        reader = open_reader(spec, record_type, name=None)
        try:
            return [record for _, record in reader.read_all()]
        finally:
            reader.close()

    trained = [m.step for m in records(topics.TRAINER, TrainerMessage) if isinstance(m, SamplesProcessed)]
    replicas = range(cfg.world.replicas)
    actor = [record for replica in replicas for record in records(topics.ACTOR, ActorRecord, replica)]
    preprocessor = [
        record for replica in replicas for record in records(topics.PREPROCESSOR, PreprocessorProgress, replica)
    ]
    return build(actor, preprocessor, max(trained, default=0))


def _say(entry: LedgerEntry) -> str:
    return f"{entry.outcome} ({entry.reason})" if entry.reason else f"{entry.outcome} in step {entry.step}"


def main() -> None:
    parser = argparse.ArgumentParser(description="What became of every dispatched rollout of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object per rollout instead of the counts")
    args = parser.parse_args()
    ledger = read(args.run_dir)
    if args.json:
        for entry in ledger.entries:
            print(msgspec.json.encode(entry).decode())
    else:
        for outcome, count in sorted(ledger.counts().items()):
            print(f"{count:8d}  {outcome}")
    for violation in ledger.violations:
        print(f"VIOLATION  {violation}", file=sys.stderr)
    sys.exit(1 if ledger.violations else 0)


if __name__ == "__main__":
    main()
