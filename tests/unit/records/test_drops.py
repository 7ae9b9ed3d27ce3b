"""The reasons for which rollouts are not trained."""

import re
from pathlib import Path

import msgspec
import pytest

from pipelinerl.records import PreprocessorProgress
from pipelinerl.records.drops import DropReason

PAGE = Path(__file__).parents[3] / "docs" / "failures.md"


def test_page_has_the_table_of_all_reasons() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Why a rollout is not trained\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    assert rows == [(str(reason), str(reason.stage), reason.text, reason.fix) for reason in DropReason]
    repeated = ", ".join(f"`{reason}`" for reason in DropReason if reason.repeats)
    assert repeated in section


@pytest.mark.parametrize(("word", "reason"), [("lag", DropReason.LAG), ("invalid", None), ("", None)])
def test_of_reads_a_word_of_a_record_and_knows_no_older_ones(word: str, reason: DropReason | None) -> None:
    assert DropReason.of(word) is reason


def test_records_carry_the_word_as_text() -> None:
    record = PreprocessorProgress(
        samples_packed=0,
        samples_dropped=1,
        dropped_by_reason={DropReason.LAG: 1},
        step=0,
        dropped_sample_ids=(("0-0/0", DropReason.LAG),),
    )
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=PreprocessorProgress)
    assert (found.dropped_by_reason, found.dropped_sample_ids) == ({"lag": 1}, (("0-0/0", "lag"),))
    assert type(found.dropped_sample_ids[0][1]) is str
