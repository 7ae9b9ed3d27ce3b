"""Why a run ended before its last step: written by its launcher at the end, deleted when the run continues."""

from pathlib import Path
from typing import Literal

import msgspec

from pipelinerl.config.paths import ENDING_FILE
from pipelinerl.inspect.finding import Finding, Level
from pipelinerl.world.disk import replace_file


class RunEnding(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run that is not finished."""

    kind: Literal["failed", "stopped"]
    reason: str
    """One line."""
    job: str | None = None
    """The role that failed."""


def write_ending(run_dir: Path, ending: RunEnding) -> None:
    replace_file(run_dir / ENDING_FILE, msgspec.json.encode(ending), mode=0o600)


def clear_ending(run_dir: Path) -> None:
    """Delete the ending, because the run continues."""
    (run_dir / ENDING_FILE).unlink(missing_ok=True)


def read_ending(run_dir: Path) -> RunEnding | None:
    """Return how the run ended. None: it runs, is finished, or its launcher was killed."""
    try:
        return msgspec.json.decode((run_dir / ENDING_FILE).read_bytes(), type=RunEnding)
    except (OSError, ValueError):
        return None


def ending_findings(ending: RunEnding | None) -> list[Finding]:
    """The finding about a run that failed."""
    if ending is None or ending.kind != "failed":
        return []
    log = f"{ending.job}/log.txt" if ending.job else "launcher.log"
    fix = f"Read {log}; `pipelinerl resume` goes on"
    return [Finding(Level.FAILED, "run failed", ending.reason, fix, "pipelinerl status {run}")]
