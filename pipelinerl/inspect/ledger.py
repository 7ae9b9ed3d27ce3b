"""`python -m pipelinerl.ledger RUN`: what became of every dispatched rollout.

The ledger is derived from the topics and owns nothing: `actor` says which groups were published or dropped,
`preprocessor` which rollouts were packed for which step or dropped and why, `trainer` how many steps are trained.
A dispatch settled twice or lost, a rollout trained twice, or one of a published group that is neither trained, dropped
nor still ahead of the trainer, is an error that the command reports with a non-zero exit.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.load import load_old_run
from pipelinerl.inspect.outside import look_into
from pipelinerl.records import (
    ActorRecord,
    GroupDropped,
    OrderResumed,
    PreprocessorProgress,
    RolloutGroup,
    SamplesProcessed,
    TrainerMessage,
    TrainingResumed,
    topics,
)
from pipelinerl.streams import SingleStreamSpec, open_reader
from pipelinerl.streams.epoch import LEDGER_FILE, lost_folder, read_epoch


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One rollout, `sample_id` = `<group_id>/<attempt>`; `attempt` is `*` for a group that never came to be."""

    sample_id: str
    outcome: str
    """trained, packed (its step is not done yet), dropped, queued (published, not packed yet), or in flight:
    a dispatch that later ones have overtaken."""
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    entries: tuple[LedgerEntry, ...]
    violations: tuple[str, ...]
    """Dispatches settled twice or not at all; samples published or trained twice, trained though dropped, packed
    without having been published, passed over."""

    def counts(self) -> dict[str, int]:
        """Rollouts by outcome; drops by reason."""
        return dict(Counter(f"dropped/{e.reason}" if e.outcome == "dropped" else e.outcome for e in self.entries))


def build(
    actor: Iterable[ActorRecord],
    preprocessor: Iterable[PreprocessorProgress],
    steps_trained: int,
    *,
    first_offset: int = 0,
    first_progress: int = 0,
) -> Ledger:
    """Joins the records of one replica's topics; pure.

    Args:
        first_offset: of the first record of ``actor``; older ones were used up and deleted, so that what was packed
            from them cannot be looked up any more.
        first_progress: offset of the first record of ``preprocessor``; what older ones settled is not known any more.
    """
    published: dict[str, LedgerEntry] = {}
    dispatches = [record for record in actor if not isinstance(record, OrderResumed)]
    in_flight, violations = _dispatches(dispatches, complete=first_offset == 0)
    dropped_groups = []
    for record in dispatches:
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
    begin = (0, 0)
    for progress in preprocessor:
        for entry in _events(progress, steps_trained):
            earlier = settled.get(entry.sample_id)
            if earlier is not None and (earlier.outcome, earlier.step) != (entry.outcome, entry.step):
                violations.append(f"{entry.sample_id} was {_say(earlier)} and {_say(entry)}")
            if entry.sample_id not in published and begin[0] >= first_offset:
                violations.append(f"{entry.sample_id} was {_say(entry)} but never published")
            settled[entry.sample_id] = entry
        begin = progress.source
    names = list(published)
    if first_progress:
        names = list(dropwhile(lambda name: name not in settled, names))
    violations += _passed_over(names, settled)
    entries = (*in_flight, *dropped_groups, *(published | settled).values())
    return Ledger(entries=entries, violations=tuple(violations))


def _dispatches(
    records: Sequence[RolloutGroup | GroupDropped], *, complete: bool
) -> tuple[list[LedgerEntry], list[str]]:
    """Dispatches in flight, and what is wrong with the numbers; gaps say something only when the topic is complete."""
    times = Counter(record.dispatch_index for record in records)
    violations = [f"dispatch {number} was settled {count} times" for number, count in times.items() if count > 1]
    if not complete or not records:
        return [], violations
    settled = records[-1].settled_before
    missing = [number for number in range(max(times)) if number not in times]
    violations += [f"dispatch {number} counts as settled but has no record" for number in missing if number < settled]
    in_flight = [number for number in missing if number >= settled]
    return [LedgerEntry(sample_id=f"dispatch {number}/*", outcome="in flight") for number in in_flight], violations


def _events(progress: PreprocessorProgress, steps_trained: int) -> list[LedgerEntry]:
    """What a record of the preprocessor says about samples."""
    step = progress.step - 1
    outcome = "trained" if step < steps_trained else "packed"
    packed = [LedgerEntry(sample_id=i, outcome=outcome, step=step) for i in progress.packed_sample_ids]
    return packed + [LedgerEntry(sample_id=i, outcome="dropped", reason=r) for i, r in progress.dropped_sample_ids]


def _passed_over(published: Sequence[str], settled: Mapping[str, LedgerEntry]) -> list[str]:
    """Samples are settled in the order of their publication: one that is not, before one that is packed, is lost."""
    packed = (i for i, name in enumerate(published) if name in settled and settled[name].outcome != "dropped")
    last = max(packed, default=0)
    return [f"{name} was passed over: neither packed nor dropped" for name in published[:last] if name not in settled]


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """One ledger of all replicas, whose samples are different ones."""
    entries = tuple(entry for ledger in ledgers for entry in ledger.entries)
    counts = Counter(entry.sample_id for entry in entries)
    shared = tuple(f"{name} belongs to several replicas" for name, count in counts.items() if count > 1)
    return Ledger(entries=entries, violations=(*(v for ledger in ledgers for v in ledger.violations), *shared))


def over_epochs(earlier: Sequence[tuple[int, Sequence[LedgerEntry]]], present: Ledger) -> Ledger:
    """One ledger of a run whose streams were begun anew; pure.

    Args:
        earlier: (step of the checkpoint that it ended with, entries) of each epoch that ended, oldest first.
    """
    known: dict[str, LedgerEntry] = {}
    violations = list(present.violations)
    for number, (step, entries) in enumerate(earlier, start=1):
        for entry in entries:
            if entry.outcome in ("packed", "queued") or (entry.step is not None and entry.step >= step):
                reason = f"streams {number} ended with the checkpoint of step {step}"
                entry = LedgerEntry(sample_id=entry.sample_id, outcome="lost", reason=reason)
            if entry.outcome != "in flight":
                violations += _trained_twice(known, entry)
                known[entry.sample_id] = entry
    for entry in present.entries:
        violations += _trained_twice(known, entry)
        known[entry.sample_id] = entry
    return Ledger(entries=tuple(known.values()), violations=tuple(violations))


def _trained_twice(known: Mapping[str, LedgerEntry], entry: LedgerEntry) -> list[str]:
    before = known.get(entry.sample_id)
    if before is None or before.outcome != "trained" or entry.outcome not in ("trained", "packed", "queued"):
        return []
    return [f"{entry.sample_id} was {_say(before)} and, in new streams, {_say(entry)}"]


def read_earlier(run_dir: Path) -> list[tuple[int, list[LedgerEntry]]]:
    """What was written down when the streams were begun anew; empty for a run with its first streams."""
    found = []
    last = read_epoch(run_dir).number
    for number in range(1, last):
        following = run_dir if number + 1 == last else lost_folder(run_dir, number + 1)
        path = lost_folder(run_dir, number) / LEDGER_FILE
        lines = path.read_bytes().splitlines() if path.exists() else []
        entries = [msgspec.json.decode(line, type=LedgerEntry) for line in lines]
        found.append((read_epoch(following).step or 0, entries))
    return found


def read(run_dir: Path) -> Ledger:
    """The ledger of a run folder, finished or running, from its streams."""
    earlier = read_earlier(run_dir)
    present = read_present(run_dir)
    return over_epochs(earlier, present) if earlier else present


def read_present(run_dir: Path) -> Ledger:
    """The ledger of the present streams."""

    def records(topic: str, record_type: object, instance: int = 0) -> tuple[int, list]:
        spec = SingleStreamSpec(exp_path=run_dir, topic=topic, instance=instance)
        found: list[tuple[int, Any]] = []
        with open_reader(spec, record_type, name=None, over_damage=True) as reader:
            while batch := reader.poll(0):
                found += [(offset, without_tokens(record)) for offset, record in batch]
        return (found[0][0] if found else 0), [record for _, record in found]

    with look_into(run_dir):
        _, messages = records(topics.TRAINER, TrainerMessage)
        made = [m.step for m in messages if isinstance(m, SamplesProcessed | TrainingResumed)]
        steps_trained = max(made, default=0)
        ledgers = []
        for replica in range(load_old_run(run_dir).world.replicas):
            first_progress, preprocessor = records(topics.PREPROCESSOR, PreprocessorProgress, replica)
            first_offset, actor = records(topics.ACTOR, ActorRecord, replica)
            firsts = {"first_offset": first_offset, "first_progress": first_progress}
            ledgers.append(build(actor, preprocessor, steps_trained, **firsts))
    return merge(ledgers)


def without_tokens(record: Any) -> Any:
    """The record as far as the ledger asks for it: the tokens of a long topic do not fit into memory."""
    if not isinstance(record, RolloutGroup):
        return record
    rollouts = tuple(msgspec.structs.replace(rollout, sequences=()) for rollout in record.rollouts)
    return msgspec.structs.replace(record, rollouts=rollouts)


def _say(entry: LedgerEntry) -> str:
    return f"{entry.outcome} ({entry.reason})" if entry.reason else f"{entry.outcome} in step {entry.step}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl.ledger", description="What became of every dispatched rollout of a run."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object per rollout instead of the counts")
    args = parser.parse_args(argv)
    ledger = read(args.run_dir)
    if args.json:
        for entry in ledger.entries:
            print(msgspec.json.encode(entry).decode())
    else:
        for outcome, count in sorted(ledger.counts().items()):
            print(f"{count:8d}  {outcome}")
    for violation in ledger.violations:
        print(f"VIOLATION  {violation}", file=sys.stderr)
    return 1 if ledger.violations else 0
