"""What is resolved of the order of the problems, as ranges."""

import msgspec

from pipelinerl.records import DataOrder
from pipelinerl.records.order import DomainOrder, EpochOrder, OrderFold, numbers, ranges


def test_resolved_turns_become_ranges_and_whole_epochs():
    fold = OrderFold()
    for turn in (0, 1, 4, 2):
        fold.mark_resolved("d", 0, turn, 6)
    fold.mark_resolved("d", 1, 3, 6)
    fold.count(["d", "d", "e"])
    assert fold.to_record() == DataOrder(
        domains={
            "d": DomainOrder(
                samples=2,
                epochs={0: EpochOrder(size=6, settled=((0, 3), (4, 5))), 1: EpochOrder(size=6, settled=((3, 4),))},
            ),
            "e": DomainOrder(samples=1),
        }
    )
    for turn in (3, 5, 5, 0):  # twice makes no difference, not even when the epoch is done
        fold.mark_resolved("d", 0, turn, 6)
    record = fold.to_record()
    assert record.domains["d"].done == ((0, 1),)
    assert list(record.domains["d"].epochs) == [1]
    assert OrderFold(record).to_record() == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=DataOrder) == record


def test_a_long_run_has_a_short_order():
    fold = OrderFold()
    for epoch in range(3):
        for turn in range(5000):
            fold.mark_resolved("d", epoch, turn, 5000)
    assert len(msgspec.json.encode(fold.to_record())) < 100


def test_ranges_of_numbers_in_any_order_ascend():
    assert ranges([9, 4, 0, 1, 5, 10]) == ((0, 2), (4, 6), (9, 11))
    assert numbers(((0, 2), (4, 6), (9, 11))) == {0, 1, 4, 5, 9, 10}
    assert (ranges([]), numbers([])) == ((), set())


def test_domains_and_epochs_of_a_record_ascend_whatever_came_first():
    fold = OrderFold()
    fold.count(["e", "d"])
    for epoch in (12, 3, 7):
        fold.mark_resolved("d", epoch, 0, 2)
    assert list(fold.to_record().domains) == ["d", "e"]
    assert list(fold.to_record().domains["d"].epochs) == [3, 7, 12]
    assert DomainOrder().samples == 0
