"""The stream epoch of a run. A new epoch starts when damaged streams are replaced by new ones from a checkpoint.

The epoch number is stored in the run folder. The streams of an ended epoch are kept in `lost/epoch_<number>/`.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

from pipelinerl.errors import CorruptStreamError, StreamError
from pipelinerl.world.disk import replace_file

Kept = TypeVar("Kept")
EPOCH_FILE = "stream_epoch.json"
LOST_FOLDER = "lost"
EVALUATIONS_FILE = "evaluations.jsonl"
"""In the folder of an ended epoch: its evaluations, which the next epoch takes over."""
LEDGER_FILE = "ledger.jsonl"
"""In the folder of an ended epoch: the outcome of every rollout."""


class StreamEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """An epoch of a run's streams."""

    number: int = 1
    step: int | None = None
    """Optimizer steps of the checkpoint that it starts from. None until the trainer has loaded a checkpoint."""


def read_epoch(run_dir: Path) -> StreamEpoch:
    """Returns the current epoch of a run folder, or epoch 1 if none is stored. Raises ``StreamError`` if unreadable."""
    path = run_dir / EPOCH_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=StreamEpoch)
    except FileNotFoundError:
        return StreamEpoch()
    except (OSError, ValueError) as error:
        raise StreamError(f"{path} cannot be read: {error}; delete it and start with resume=checkpoint") from error


def write_epoch(run_dir: Path, epoch: StreamEpoch) -> None:
    replace_file(run_dir / EPOCH_FILE, msgspec.json.encode(epoch), mode=0o600, sync=True)


def read_lost(path: Path, kind: type[Kept]) -> list[Kept]:
    """Returns what an ended epoch's file holds, a line each. Empty if there is none.

    Raises:
        CorruptStreamError: a line is damaged.
    """
    try:
        return [msgspec.json.decode(line, type=kind) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CorruptStreamError(f"{path} is damaged ({error}); without this file the run goes on") from error


def lost_folder(run_dir: Path, number: int) -> Path:
    """Returns the folder that keeps the streams of ended epoch ``number``."""
    return run_dir / LOST_FOLDER / f"epoch_{number}"
