"""What is settled of the order of the problems, as ranges."""

import msgspec

from pipelinerl.records import DataOrder
from pipelinerl.records.order import DomainOrder, EpochOrder, OrderFold


def test_settled_turns_become_ranges_and_whole_epochs():
    fold = OrderFold()
    for turn in (0, 1, 4, 2):
        fold.settle("d", 0, turn, 6)
    fold.settle("d", 1, 3, 6)
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
        fold.settle("d", 0, turn, 6)
    record = fold.to_record()
    assert record.domains["d"].done == ((0, 1),)
    assert list(record.domains["d"].epochs) == [1]
    assert OrderFold(record).to_record() == record
    assert msgspec.json.decode(msgspec.json.encode(record), type=DataOrder) == record


def test_a_long_run_has_a_short_order():
    fold = OrderFold()
    for epoch in range(3):
        for turn in range(5000):
            fold.settle("d", epoch, turn, 5000)
    assert len(msgspec.json.encode(fold.to_record())) < 100
