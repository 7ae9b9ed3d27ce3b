"""The generator of what is said about keys: comments that fit, tables, marks, and a check that notices."""

import subprocess
import sys

import pytest
import yaml

from pipelinerl.config import docs
from pipelinerl.config.keys import Section, key


class Lines(Section):
    """Two sentences. In one paragraph."""

    short: int = key(1, "first. Second")
    long: int = key(2, "first sentence that fits. " + "and a second one that does not fit at all any more " * 3)
    above: int = key(3, "a first sentence that is far too long for a comment beside a value " * 2)
    table: dict[str, str] = key({f"key_{i}": "x" * 20 for i in range(5)}, "a table")


class Nested(Section):
    """Nested."""

    lines: Lines


def test_yaml_of_puts_comments_where_they_fit():
    text = docs.yaml_of(Nested)
    lines = text.splitlines()
    assert lines[0] == "lines:"
    assert lines[1] == "  short: 1                        # first. Second"
    assert lines[2] == "  long: 2                         # first sentence that fits"
    assert lines[3].startswith("  # a first sentence")
    assert lines[4].startswith("  # ")
    assert lines[5] == "  above: 3"
    assert lines[6] == "  table:                          # a table"
    assert max(map(len, lines)) <= 120
    assert yaml.safe_load(text) == {
        "lines": {"short": 1, "long": 2, "above": 3, "table": {f"key_{i}": "x" * 20 for i in range(5)}}
    }


def test_table_has_a_row_per_key():
    text = docs.section_table("`lines`", Lines, docs.declared(Lines, "lines."))
    assert "| `lines.short` | integer | `1` | fixed | first. Second |" in text
    assert "\n\nTwo sentences. In one paragraph.\n\n" in text


@pytest.mark.parametrize("marks", ["# {}", "<!-- {} -->"])
def test_stale_names_a_file_that_differs_and_keeps_what_is_written_by_hand(tmp_path, marks):
    page = tmp_path / "page"
    page.write_text(f"head\n{marks.format(docs.BEGIN)}\nold\n{marks.format('end')}\ntail\n")
    [(path, wanted)] = docs.stale({"page": "new\nlines"}, tmp_path)
    assert path == page
    assert wanted == f"head\n{marks.format(docs.BEGIN)}\nnew\nlines\n{marks.format('end')}\ntail\n"
    page.write_text(wanted)
    assert list(docs.stale({"page": "new\nlines"}, tmp_path)) == []


def test_command_checks_the_checkout():
    done = subprocess.run([sys.executable, "-m", "pipelinerl.config.docs", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
