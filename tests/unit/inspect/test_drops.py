"""The table of what a run did not train, by hand."""

import json
from pathlib import Path

from pipelinerl.inspect.drops import drops_table, read_drops
from pipelinerl.records.drops import DropReason


def write(run_dir: Path, kind: str, **values: float) -> None:
    (run_dir / "metrics").mkdir(exist_ok=True)
    with open(run_dir / "metrics" / f"{kind}.jsonl", "a", encoding="utf-8") as stream:
        stream.write(json.dumps(values) + "\n")


def test_drops_table_has_a_row_per_reason_from_the_newest_metrics_of_every_replica(tmp_path: Path) -> None:
    newest = {"failures/timeout": 5, "failures/verifier": 0, "groups_dropped/timeout": 1, "groups": 3}
    write(tmp_path, "actor", **newest)
    write(tmp_path, "actor_1", **{"failures/timeout": 2, "groups_dropped/timeout": 1, "groups": 7})
    write(tmp_path, "preprocessor", **{"dropped/invalid": 3, "dropped/lag": 4})
    write(tmp_path, "preprocessor_1", **{"dropped/lag": 2})
    drops = read_drops(tmp_path, replicas=2)
    assert drops.published_groups == 10
    assert drops_table(drops) == [
        ("timeout", "7", "2", "", DropReason.TIMEOUT.text, DropReason.TIMEOUT.fix),
        ("lag", "", "", "6", DropReason.LAG.text, DropReason.LAG.fix),
        ("invalid", "", "", "3", "", ""),
    ]


def test_drops_table_of_a_run_without_metrics_is_empty(tmp_path: Path) -> None:
    assert drops_table(read_drops(tmp_path)) == []
