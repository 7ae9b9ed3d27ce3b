"""The ledger, by hand: two published groups, one drop, one packed step ahead of the trainer."""

import re

import msgspec
import numpy as np
import pytest

from pipelinerl.inspect.ledger import LedgerEntry, ledger_of, merge, show
from pipelinerl.records import GroupDropped, PreprocessorProgress, Rollout, RolloutGroup, TrainingSequence
from pipelinerl.streams.files import cursor
from pipelinerl.streams.files.segment import MAGIC
from tests.run_folder import Story, make_run
from tests.says import says

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
    (violation,) = ledger.violations
    assert re.search(says("0-0/0", "step 0", "step 1"), violation)


def test_build_republished_progress_after_a_restart_is_no_violation():
    ledger = ledger_of([group(0)], [progress(1, ("0-0/0",)), progress(1, ("0-0/0",))], steps_trained=1)
    assert ledger.violations == ()


def test_build_sample_from_nowhere_is_a_violation():
    (violation,) = ledger_of([], [progress(1, ("9-9/0",))], steps_trained=1).violations
    assert re.search(says("9-9/0", "step 0", "never published"), violation)


def test_build_dispatch_resolved_twice_or_never_is_a_violation_and_one_overtaken_is_in_flight():
    again = msgspec.structs.replace(group(2), dispatch_index=1)
    (violation,) = ledger_of([group(0), group(1), again], [], steps_trained=0).violations
    assert re.search(says("dispatch 1", "2 times"), violation)
    last = msgspec.structs.replace(group(4), settled_before=3)
    ledger = ledger_of([group(0), group(2), last], [], steps_trained=0)
    (violation,) = ledger.violations
    assert re.search(says("dispatch 1", "no record"), violation)
    assert LedgerEntry(sample_id="dispatch 3/*", outcome="in flight") in ledger.entries
    assert ledger_of([group(2), last], [], steps_trained=0, first_offset=1).violations == ()


def test_build_sample_that_later_ones_overtook_is_a_violation():
    ledger = ledger_of([group(0), group(1)], [progress(1, ("0-0/0", "0-1/0"))], steps_trained=1)
    (violation,) = ledger.violations
    assert re.search(says("0-0/1", "neither packed nor dropped"), violation)
    assert ledger.counts() == {"trained": 2, "queued": 2}


def test_build_after_retention_asks_only_for_what_the_topic_still_holds():
    old = msgspec.structs.replace(progress(1, ("0-0/0", "0-0/1")), source=(1, 0))
    new = msgspec.structs.replace(progress(2, ("0-1/0", "0-1/1")), source=(2, 0))
    assert ledger_of([group(1)], [old, new], steps_trained=2, first_offset=1).violations == ()
    wrong = ledger_of([group(2)], [old, new], steps_trained=2, first_offset=1).violations
    assert wrong == tuple(f"0-1/{a} was trained in step 1 but never published" for a in range(2))


def test_build_damaged_record_of_the_actor_explains_one_group_but_not_two():
    last = msgspec.structs.replace(group(3), settled_before=3)
    packed = [progress(1, ("0-0/0", "0-0/1", "0-1/0", "0-1/1"))]
    ledger = ledger_of([group(0), group(2), last], packed, steps_trained=1, unreadable_actor=1)
    assert (ledger.violations, ledger.unreadable) == ((), 1)
    assert LedgerEntry(sample_id="dispatch 1/*", outcome="unreadable") in ledger.entries
    assert ledger.counts() == {"trained": 4, "queued": 4, "unreadable": 1}
    wrong = ledger_of([group(0), last], packed, steps_trained=1, unreadable_actor=1).violations
    assert [int(re.findall(r"dispatch (\d+)", violation)[0]) for violation in wrong] == [1, 2]
    packed = [progress(1, ("0-0/0", "0-0/1", "8-8/0", "9-9/0"))]
    wrong = ledger_of([group(0)], packed, steps_trained=1, unreadable_actor=1).violations
    assert len(wrong) == 2
    assert re.match(says("8-8/0", "published"), wrong[0])
    assert re.match(says("9-9/0", "published"), wrong[1])


def test_build_damaged_record_of_the_preprocessor_may_have_resolved_what_seems_passed_over():
    ledger = ledger_of([group(0), group(1)], [progress(2, ("0-1/0",))], steps_trained=2, unreadable_progress=1)
    assert ledger.violations == ()
    assert ledger.counts() == {"trained": 1, "queued": 3}


@pytest.mark.parametrize("topic", ["actor", "preprocessor", "trainer"])
def test_flipped_bit_in_any_record_is_told_and_is_no_violation(tmp_path, monkeypatch, capsys, topic):
    monkeypatch.setattr(cursor, "_REREAD_PAUSE_S", 0)
    run = make_run(tmp_path / "run", Story(steps=4))
    assert show(run, as_json=False) == 0
    path = run / "streams" / topic / "0" / "0" / f"{0:020d}.log"
    content = path.read_bytes()
    for place in (0.1, *range(1, 12, 2)):
        damaged = bytearray(content)
        damaged[max(len(MAGIC), int(len(content) * place / 12))] ^= 1
        path.write_bytes(damaged)
        assert show(run, as_json=False) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        assert re.search(r"^ +1  damaged", printed.out, re.MULTILINE), place


def test_merge_sample_of_two_replicas_is_a_violation():
    ledger = merge([ledger_of([group(0)], [], 0), ledger_of([group(0), group(1)], [], 0)])
    assert ledger.violations == tuple(f"0-0/{a} belongs to several replicas" for a in range(2))
