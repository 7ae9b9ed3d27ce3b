"""Parameters of which ranks hold rows: unequal numbers of them, and none on the last ranks."""

from pathlib import Path

from benchmarks.receivers import forkserver
from tests.models import make_qwen2
from tests.rank_processes import call_on_ranks
from tests.ranks import gather_rank


def test_gathered_parameters_are_whole_on_every_rank(tmp_path: Path) -> None:
    make_qwen2(37, hidden=4, intermediate=7).save_pretrained(tmp_path / "model")
    with forkserver(gather_rank.__name__):
        call_on_ranks(gather_rank.main, {"model": str(tmp_path / "model")}, tmp_path / "out", 3)
