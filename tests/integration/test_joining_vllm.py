"""vLLM servers join a run that is under way, by the run's address alone; one leaves as asked, one is killed."""

from pathlib import Path

import pytest

from benchmarks.joining import START_TIMEOUT_S, Join

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * START_TIMEOUT_S)]


def test_servers_join_leave_and_die_during_a_run(tmp_path: Path) -> None:
    result = Join(tmp_path).measure()
    print(result)
    assert result["violations"] == []
    assert not [name for name in result["samples"] if name.startswith("dropped/") and name != "dropped/lag"]
    assert result["median_s"] < 10
