"""The ledger, by hand: two published groups, one drop, one packed step ahead of the trainer."""

import msgspec
import numpy as np

from pipelinerl.inspect.ledger import LedgerEntry, ledger_of, merge
from pipelinerl.records import GroupDropped, PreprocessorProgress, Rollout, RolloutGroup, TrainingSequence

SEQUENCE = TrainingSequence(
    token_ids=np.array([1, 2], np.int32),
    logprobs=np.array([-0.5], np.float32),
    spans=np.array([[1, 2, 0]], np.int32),
    finish_reason="stop",
)
PLACE = {"epoch": 0, "problem_index": 0, "actor": 0, "domain": "d", "dataset": "train", "settled_before": 0}


def group(position: int) -> RolloutGroup:
    rollouts = tuple(
        Rollout(attempt=a, reward=1.0, sequences=(SEQUENCE,), metrics={}, latency_s=0.1, num_llm_calls=1)
        for a in range(2)
    )
    return RolloutGroup(
        **PLACE,
        group_id=f"0-{position}",
        position=position,
        dispatch_index=position,
        attempts=2,
        rollouts=rollouts,
        dispatched_version=0,
    )


def progress(step: int, packed: tuple[str, ...], dropped: tuple[tuple[str, str], ...] = ()) -> PreprocessorProgress:
    return PreprocessorProgress(
        samples_packed=0,
        samples_dropped=0,
        dropped_by_reason={},
        step=step,
        packed_sample_ids=packed,
        dropped_sample_ids=dropped,
    )


def test_build_every_outcome_is_named_once():
    lost = GroupDropped(
        **PLACE, group_id="0-2", position=2, dispatch_index=2, attempts=2, reason="timeout", detail="late"
    )
    ledger = ledger_of(
        [group(0), group(1), lost, group(3)],
        [progress(1, ("0-0/0", "0-0/1")), progress(2, ("0-1/0",), (("0-1/1", "lag"),))],
        steps_trained=1,
    )
    assert ledger.violations == ()
    assert ledger.counts() == {"trained": 2, "packed": 1, "dropped/lag": 1, "dropped/timeout": 1, "queued": 2}
    assert LedgerEntry(sample_id="0-1/0", outcome="packed", step=1) in ledger.entries


def test_build_sample_in_two_steps_is_a_violation():
    ledger = ledger_of([group(0)], [progress(1, ("0-0/0",)), progress(2, ("0-0/0",))], steps_trained=2)
    assert ledger.violations == ("0-0/0 was trained in step 0 and trained in step 1",)


def test_build_republished_progress_after_a_restart_is_no_violation():
    ledger = ledger_of([group(0)], [progress(1, ("0-0/0",)), progress(1, ("0-0/0",))], steps_trained=1)
    assert ledger.violations == ()


def test_build_sample_from_nowhere_is_a_violation():
    assert ledger_of([], [progress(1, ("9-9/0",))], steps_trained=1).violations == (
        "9-9/0 was trained in step 0 but never published",
    )


def test_build_dispatch_settled_twice_or_never_is_a_violation_and_one_overtaken_is_in_flight():
    again = msgspec.structs.replace(group(2), dispatch_index=1)
    assert ledger_of([group(0), group(1), again], [], steps_trained=0).violations == ("dispatch 1 was settled 2 times",)
    last = msgspec.structs.replace(group(4), settled_before=3)
    ledger = ledger_of([group(0), group(2), last], [], steps_trained=0)
    assert ledger.violations == ("dispatch 1 counts as settled but has no record",)
    assert LedgerEntry(sample_id="dispatch 3/*", outcome="in flight") in ledger.entries
    assert ledger_of([group(2), last], [], steps_trained=0, first_offset=1).violations == ()


def test_build_sample_that_later_ones_overtook_is_a_violation():
    ledger = ledger_of([group(0), group(1)], [progress(1, ("0-0/0", "0-1/0"))], steps_trained=1)
    assert ledger.violations == ("0-0/1 was passed over: neither packed nor dropped",)
    assert ledger.counts() == {"trained": 2, "queued": 2}


def test_build_after_retention_asks_only_for_what_the_topic_still_holds():
    old = msgspec.structs.replace(progress(1, ("0-0/0", "0-0/1")), source=(1, 0))
    new = msgspec.structs.replace(progress(2, ("0-1/0", "0-1/1")), source=(2, 0))
    assert ledger_of([group(1)], [old, new], steps_trained=2, first_offset=1).violations == ()
    wrong = ledger_of([group(2)], [old, new], steps_trained=2, first_offset=1).violations
    assert wrong == tuple(f"0-1/{a} was trained in step 1 but never published" for a in range(2))


def test_merge_sample_of_two_replicas_is_a_violation():
    ledger = merge([ledger_of([group(0)], [], 0), ledger_of([group(0), group(1)], [], 0)])
    assert ledger.violations == tuple(f"0-0/{a} belongs to several replicas" for a in range(2))
