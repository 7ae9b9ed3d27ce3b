"""Parameters of which ranks hold rows: unequal numbers of them, and none on the last ranks."""

from pathlib import Path

from benchmarks.ranks import run_ranks
from tests.models import make_qwen2

ROOT = Path(__file__).parents[2]


def test_gathered_parameters_are_whole_on_every_rank(tmp_path: Path) -> None:
    make_qwen2(37, hidden=4, intermediate=7).save_pretrained(tmp_path)
    script = ROOT / "tests" / "ranks" / "gather_rank.py"
    run_ranks(script, [str(tmp_path)], 3, timeout_s=600, env={"PYTHONPATH": str(ROOT)})
