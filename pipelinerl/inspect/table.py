"""Rollouts of one step as rows of a table, for trackers. Reads the archive only."""

from pathlib import Path
from typing import Any

from pipelinerl.archive import read_archive
from pipelinerl.inspect.decode import TokenText
from pipelinerl.inspect.rollouts import whole_text
from pipelinerl.inspect.samples import SeenRollout, from_archive, read_scored_sequences
from pipelinerl.records import ArchivedStep

COLUMNS = (
    *("step", "sample", "domain", "problem", "text", "reward", "advantage", "success", "fate", "lag", "tokens"),
    *("finish_reason", "flags"),
)
MAX_ROWS = 16
MAX_CHARS = 8000


def sample_rows(run_dir: Path, step: int, text: TokenText, count: int = MAX_ROWS) -> list[list[Any]]:
    """Rows of ``COLUMNS`` for at most ``count`` archived rollouts of a step: the flagged ones, then by their names."""
    scores = read_scored_sequences(run_dir, step)
    found = [
        from_archive(rollout, step, scores)
        for _, _, records in read_archive(run_dir, "preprocessor", ArchivedStep, step)
        for record in records
        for rollout in record.rollouts
    ]
    found.sort(key=lambda seen: (not seen.flags, seen.sample_id))
    return [_row(seen, text) for seen in found[:count]]


def _row(seen: SeenRollout, text: TokenText) -> list[Any]:
    return [
        seen.step,
        seen.sample_id,
        seen.domain,
        seen.problem[:MAX_CHARS],
        whole_text(seen, text)[:MAX_CHARS],
        seen.rollout.reward,
        seen.advantage,
        seen.success,
        seen.fate,
        seen.lag,
        seen.num_sampled,
        seen.finish_reason,
        " ".join(seen.flags),
    ]
