"""The outcome of every dispatched rollout (`pipelinerl status RUN --ledger`), derived from the topics.

A violation is a dispatch that was resolved twice or lost, a rollout that was trained twice, or a published rollout that
is neither trained, nor dropped, nor still ahead of the trainer. A damaged record is counted and is no violation.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.load import load_old_run
from pipelinerl.inspect.reading import look_into
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
from pipelinerl.streams import SingleStreamSpec, get_streams_backend, open_reader
from pipelinerl.streams.epoch import LEDGER_FILE, lost_folder, read_epoch, read_lost


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One rollout with `sample_id` = `<group_id>/<attempt>`. `attempt` is `*` for a group that was not published."""

    sample_id: str
    outcome: str
    """trained, packed (its step is not done yet), dropped, queued (published, not packed yet), lost (its streams were
    set aside), in flight (a dispatch that later ones have overtaken), or unreadable (its record is damaged)."""
    step: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Ledger:
    entries: tuple[LedgerEntry, ...]
    violations: tuple[str, ...]
    """Dispatches that were resolved twice or not at all. Samples that were published or trained twice, trained although
    dropped, packed although not published, or passed over."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Server → rollouts that are not used, because the server missed the weight probe for them. They are no entries:
    their attempts were made again, or their groups were dropped."""
    unreadable: int = 0
    """Records of the topics that are damaged."""

    def counts(self) -> dict[str, int]:
        """Count rollouts by outcome, and dropped ones by reason."""
        return dict(Counter(f"dropped/{e.reason}" if e.outcome == "dropped" else e.outcome for e in self.entries))


def ledger_of(
    actor: Iterable[ActorRecord],
    preprocessor: Iterable[PreprocessorProgress],
    steps_trained: int,
    *,
    first_offset: int = 0,
    first_progress: int = 0,
    unreadable_actor: int = 0,
    unreadable_progress: int = 0,
) -> Ledger:
    """Build the ledger of one replica from the records of its topics. Pure.

    Args:
        first_offset: of ``actor``: samples packed from older, deleted records cannot be looked up.
        first_progress: offset of the first record of ``preprocessor``. What older records resolved is unknown.
        unreadable_actor: number of damaged records of ``actor``, each of which may have resolved one dispatch.
        unreadable_progress: number of damaged records of ``preprocessor``, which may have resolved any sample.
    """
    published: dict[str, LedgerEntry] = {}
    dispatches = [record for record in actor if not isinstance(record, OrderResumed)]
    unresolved, violations = _dispatches(dispatches, complete=first_offset == 0, unreadable=unreadable_actor)
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
    resolved: dict[str, LedgerEntry] = {}
    unpublished: dict[str, list[LedgerEntry]] = {}
    """By group."""
    begin = (0, 0)
    for progress in preprocessor:
        for entry in _events(progress, steps_trained):
            earlier = resolved.get(entry.sample_id)
            if earlier is not None and (earlier.outcome, earlier.step) != (entry.outcome, entry.step):
                violations.append(f"{entry.sample_id} was {_outcome(earlier)} and {_outcome(entry)}")
            if entry.sample_id not in published and begin[0] >= first_offset:
                unpublished.setdefault(entry.sample_id.rpartition("/")[0], []).append(entry)
            resolved[entry.sample_id] = entry
        begin = progress.source
    if len(unpublished) > unreadable_actor:
        violations += [
            f"{e.sample_id} was {_outcome(e)} but never published" for es in unpublished.values() for e in es
        ]
    names = list(published)
    if first_progress:
        names = list(dropwhile(lambda name: name not in resolved, names))
    if not unreadable_progress:
        violations += _passed_over(names, resolved)
    entries = (*unresolved, *dropped_groups, *(published | resolved).values())
    refused = sum((Counter(record.refused) for record in dispatches), Counter[str]())
    unreadable = unreadable_actor + unreadable_progress
    return Ledger(entries=entries, violations=tuple(violations), refused=refused, unreadable=unreadable)


def _dispatches(
    records: Sequence[RolloutGroup | GroupDropped], *, complete: bool, unreadable: int
) -> tuple[list[LedgerEntry], list[str]]:
    """Return the dispatches without a record, and the violations of dispatch numbers. Gaps count only if `complete`."""
    times = Counter(record.dispatch_index for record in records)
    violations = [f"dispatch {number} was resolved {count} times" for number, count in times.items() if count > 1]
    if not complete or not records:
        return [], violations
    resolved = records[-1].settled_before
    missing = [number for number in range(max(times)) if number not in times]
    lost = [number for number in missing if number < resolved]
    if len(lost) > unreadable:
        violations += [f"dispatch {number} counts as resolved but has no record" for number in lost]
    outcomes = {number: "in flight" if number >= resolved else "unreadable" for number in missing}
    entries = [
        LedgerEntry(sample_id=f"dispatch {number}/*", outcome=outcome)
        for number, outcome in outcomes.items()
        if outcome == "in flight" or len(lost) <= unreadable
    ]
    return entries, violations


def _events(progress: PreprocessorProgress, steps_trained: int) -> list[LedgerEntry]:
    """Return the samples that a record of the preprocessor resolves."""
    step = progress.step - 1
    outcome = "trained" if step < steps_trained else "packed"
    packed = [LedgerEntry(sample_id=i, outcome=outcome, step=step) for i in progress.packed_sample_ids]
    return packed + [LedgerEntry(sample_id=i, outcome="dropped", reason=r) for i, r in progress.dropped_sample_ids]


def _passed_over(published: Sequence[str], resolved: Mapping[str, LedgerEntry]) -> list[str]:
    """Find samples that were published before a packed one and are not resolved, although they must be by then."""
    packed = (i for i, name in enumerate(published) if name in resolved and resolved[name].outcome != "dropped")
    last = max(packed, default=0)
    return [f"{name} was passed over: neither packed nor dropped" for name in published[:last] if name not in resolved]


def merge(ledgers: Sequence[Ledger]) -> Ledger:
    """Join the ledgers of all replicas. A sample that belongs to several replicas is a violation."""
    entries = tuple(entry for ledger in ledgers for entry in ledger.entries)
    counts = Counter(entry.sample_id for entry in entries)
    shared = tuple(f"{name} belongs to several replicas" for name, count in counts.items() if count > 1)
    refused = sum((Counter(ledger.refused) for ledger in ledgers), Counter[str]())
    violations = (*(v for ledger in ledgers for v in ledger.violations), *shared)
    unreadable = sum(ledger.unreadable for ledger in ledgers)
    return Ledger(entries=entries, violations=violations, refused=refused, unreadable=unreadable)


def over_epochs(earlier: Sequence[tuple[int, Sequence[LedgerEntry]]], present: Ledger) -> Ledger:
    """Join the ledgers of all stream epochs of a run. Pure.

    Args:
        earlier: (step of its last checkpoint, entries) of each ended epoch, oldest first.
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
    return replace(present, entries=tuple(known.values()), violations=tuple(violations))


def _trained_twice(known: Mapping[str, LedgerEntry], entry: LedgerEntry) -> list[str]:
    before = known.get(entry.sample_id)
    if before is None or before.outcome != "trained" or entry.outcome not in ("trained", "packed", "queued"):
        return []
    return [f"{entry.sample_id} was {_outcome(before)} and, in new streams, {_outcome(entry)}"]


def read_earlier(run_dir: Path) -> list[tuple[int, list[LedgerEntry]]]:
    """Read the ledgers of ended stream epochs, oldest first: (step of the epoch's last checkpoint, entries)."""
    found = []
    last = read_epoch(run_dir).number
    for number in range(1, last):
        following = run_dir if number + 1 == last else lost_folder(run_dir, number + 1)
        entries = read_lost(lost_folder(run_dir, number) / LEDGER_FILE, LedgerEntry)
        found.append((read_epoch(following).step or 0, entries))
    return found


def read_ledger(run_dir: Path) -> Ledger:
    """Read the ledger of a finished or running run folder from its streams."""
    earlier = read_earlier(run_dir)
    present = read_present(run_dir)
    return over_epochs(earlier, present) if earlier else present


def read_present(run_dir: Path) -> Ledger:
    def records(topic: str, record_type: object, instance: int = 0) -> tuple[int, list, int]:
        """Return the offset of the first record that was not deleted, the records, and the number of damaged ones."""
        spec, backend = SingleStreamSpec(exp_path=run_dir, topic=topic, instance=instance), get_streams_backend()
        written = backend.stats(spec).next_offset
        with open_reader(spec, record_type, name=None, over_damage=True) as reader:
            found: list[tuple[int, Any]] = [(offset, without_tokens(record)) for offset, record in reader.read_each()]
        kept = backend.stats(spec).first_offset  # afterwards: a live run may have deleted some before they were read
        first, last = (min(found[0][0], kept), found[-1][0]) if found else (kept, -1)
        return first, [record for _, record in found], max(0, max(written, last + 1) - first - len(found))

    with look_into(run_dir):
        _, messages, unreadable_steps = records(topics.TRAINER, TrainerMessage)
        made = [m.step for m in messages if isinstance(m, SamplesProcessed | TrainingResumed)]
        steps_trained = max(made, default=0)
        ledgers = []
        for replica in range(load_old_run(run_dir).world.replicas):
            first_progress, preprocessor, unreadable_progress = records(
                topics.PREPROCESSOR, PreprocessorProgress, replica
            )
            first_offset, actor, unreadable_actor = records(topics.ACTOR, ActorRecord, replica)
            ledgers.append(
                ledger_of(
                    actor,
                    preprocessor,
                    steps_trained,
                    first_offset=first_offset,
                    first_progress=first_progress,
                    unreadable_actor=unreadable_actor,
                    unreadable_progress=unreadable_progress,
                )
            )
    merged = merge(ledgers)
    return replace(merged, unreadable=merged.unreadable + unreadable_steps)


def without_tokens(record: Any) -> Any:
    """Return the record without its tokens, because those of a long topic do not fit into memory."""
    if not isinstance(record, RolloutGroup):
        return record
    rollouts = tuple(msgspec.structs.replace(rollout, sequences=()) for rollout in record.rollouts)
    return msgspec.structs.replace(record, rollouts=rollouts)


def _outcome(entry: LedgerEntry) -> str:
    return f"{entry.outcome} ({entry.reason})" if entry.reason else f"{entry.outcome} in step {entry.step}"


def show(run_dir: Path, *, as_json: bool) -> int:
    """Print a run's counts, or with ``as_json`` an object per rollout. Returns 1 with violations on stderr."""
    ledger = read_ledger(run_dir)
    if as_json:
        for entry in ledger.entries:
            print(msgspec.json.encode(entry).decode())
    else:
        for outcome, count in sorted(ledger.counts().items()):
            print(f"{count:8d}  {outcome}")
        for server, count in sorted(ledger.refused.items()):
            print(f"{count:8d}  not used: {server} missed the weight probe for them")
        if ledger.unreadable:
            look = f"pipelinerl streams verify {shlex.quote(str(run_dir))}"
            print(f"{ledger.unreadable:8d}  damaged records: `{look}` says whose")
    for violation in ledger.violations:
        print(f"VIOLATION  {violation}", file=sys.stderr)
    return 1 if ledger.violations else 0
