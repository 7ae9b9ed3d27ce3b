"""docs/benchmarks.md is read at a glance, and its appendix shows the recorded results."""

import json
from pathlib import Path

import pytest

from tools import benchmark_pages

ROOT = Path(__file__).resolve().parents[2]


def test_table_of_benchmarks_is_read_at_a_glance() -> None:
    lines = (ROOT / "docs/benchmarks.md").read_text().partition("\n## ")[0].splitlines()
    rows = [[cell.split() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")][1:]
    assert 10 <= len(rows) <= 15
    assert [cell for row in rows for cell in row if len(cell) > 15] == []
    scripts = {"".join(row[2]).strip("`") for row in rows}
    assert [name for name in sorted(scripts) if not (ROOT / f"benchmarks/{name}.json").is_file()] == []


def test_results_become_tables_by_their_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark_pages, "RESULTS", tmp_path)
    (tmp_path / "speed.py").write_text('"""Speed of sound.\n\nMore."""\n')
    result = {
        "cores": 2,
        "air": {"m_per_s": 343.25, "ok": True},
        "water": {"m_per_s": 1481, "ok": None},
        "runs": [{"seed": seed, "seconds": seed / 4} for seed in range(13)],
    }
    (tmp_path / "speed_cpu.json").write_text(json.dumps(result))
    head, _, rest = benchmark_pages.page().partition("## speed_cpu\n")
    assert head == benchmark_pages.HEAD + "\n"
    assert rest.split("\n\n") == [
        "\nSpeed of sound.",
        "`benchmarks/speed_cpu.json`, of `benchmarks/speed.py`",
        "| figure | value |\n| --- | --- |\n| cores | 2 |",
        "| case | m_per_s | ok |\n| --- | --- | --- |\n| air | 343.2 | yes |\n| water | 1,481 | – |",
        "| runs, 13 rows | least | median | most |\n| --- | --- | --- | --- |\n"
        "| seed | 0 | 6 | 12 |\n| seconds | 0 | 1.5 | 3 |\n",
    ]
