"""Which streams a run is on: the first ones, or new ones that were begun from a checkpoint because those were damaged.

The number lies in the run folder. What was set aside when an epoch ended is in `lost/epoch_<number>/`.
"""

from pathlib import Path

import msgspec

from pipelinerl.disk import replace_file
from pipelinerl.errors import StreamError

EPOCH_FILE = "stream_epoch.json"
LOST_FOLDER = "lost"
EVALUATIONS_FILE = "evaluations.jsonl"
"""In the folder of an epoch that has ended: its evaluations, which the next one takes over."""
LEDGER_FILE = "ledger.jsonl"
"""In the folder of an epoch that has ended: what had become of every rollout."""


class StreamEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch of a run's streams."""

    number: int = 1
    step: int | None = None
    """Optimizer steps behind the checkpoint that it begins with; None until the trainer has loaded one."""


def read_epoch(run_dir: Path) -> StreamEpoch:
    """The present epoch of a run folder."""
    path = run_dir / EPOCH_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=StreamEpoch)
    except FileNotFoundError:
        return StreamEpoch()
    except (OSError, msgspec.MsgspecError) as error:
        raise StreamError(f"{path} cannot be read: {error}; delete it and start with resume=checkpoint") from error


def write_epoch(run_dir: Path, epoch: StreamEpoch) -> None:
    replace_file(run_dir / EPOCH_FILE, msgspec.json.encode(epoch), mode=0o600, sync=True)


def lost_folder(run_dir: Path, number: int) -> Path:
    """Where the streams of an epoch that has ended are kept."""
    return run_dir / LOST_FOLDER / f"epoch_{number}"
