"""The replay folder: what the ranks of a replay need beside the run, and what they computed, in files.

    plan                          `ReplayPlan`
    checkpoints/step_<n>          a link to the checkpoint that the replay starts from
    batches/<rank>/step_<n>       the micro-batches of each step from the checkpoint on
    results/<name>.<rank>         what the ranks computed

Configuration and model are read from the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from pipelinerl.config.paths import CHECKPOINTS
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.records import MicroBatch, ScoredSequence
from pipelinerl.streams.codec import Codec

R = TypeVar("R")

PLAN = "plan"
SHARE_PREFIXES = "share_prefixes"
"""The only key of `finetune` itself that a second computation may change."""


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which step is replayed, from where, on what."""

    run_dir: str
    step: int
    """Optimizer step, counted from 0 as in `MicroBatch`."""
    first: int
    """Step of the checkpoint, from which the steps up to ``step`` are trained. 0: the run's model itself."""
    last: int
    """Last step whose micro-batches are there. Later than ``step`` where steps share a proximal policy."""
    restores_proximal: bool = False
    """Whether the checkpoint lies inside a block of steps with one proximal policy and holds its log-probabilities for
    the run's data."""
    proximal_every: int = 1
    """Steps that share a proximal policy."""
    num_ranks: int
    threads: int
    """CPU threads of a rank."""
    accelerator: str
    """`cpu` or `cuda`."""


class StepBatches(msgspec.Struct, frozen=True, kw_only=True):
    """The micro-batches of one step and one rank."""

    records: tuple[MicroBatch, ...]


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the run recorded about the step."""

    metrics: dict[str, float]
    """Metrics of the trainer. Empty if the point was thinned out."""
    sequences: tuple[ScoredSequence, ...]
    """The trainer's numbers of the archived sequences."""
    advantages: dict[str, float]
    """The preprocessor's advantage of each archived sequence, by its id."""


class ReplayedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one training sequence's K trained tokens."""

    sequence_id: str
    token_ids: np.ndarray
    """int32 [K]"""
    positions: np.ndarray
    """int32 [K]: place of each token in its sequence."""
    versions: np.ndarray
    """int32 [K]: weight version that sampled each."""
    sampler_logprobs: np.ndarray
    """float32 [K]"""
    logprobs: np.ndarray
    """float32 [K]: of the weights before the step."""
    version_logprobs: np.ndarray
    """float32 [K]: of the weights that sampled each token. NaN where the replay did not pass through them."""
    entropy: np.ndarray
    """float32 [K], nats"""
    advantages: np.ndarray
    """float32 [K]"""
    altered: np.ndarray
    """bool [K]: the loss's clip or a correction acts on the token."""
    losses: np.ndarray
    """float32 [K]: the token's part of the step's loss, its weight included, without the value loss."""
    slopes: np.ndarray
    """float32 [K]: derivative of the loss by the token's log-probability. Below 0, the step makes it more likely."""

    @property
    def ratios(self) -> np.ndarray:
        """float64 [K]: policy over sampler."""
        return np.exp(self.logprobs.astype(np.float64) - self.sampler_logprobs)


class ReplayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's results of one objective."""

    metrics: dict[str, float]
    """As in `metrics/finetune.jsonl`, of all ranks."""
    sequences: tuple[ReplayedSequence, ...]
    """This rank's. None with `finetune.seq_parallel`, where a rank has only slices of them."""
    update_norm: float
    """Length of the change of all trained parameters."""
    update_cosine: float
    """Cosine of the angle between this change and the one of the run's own objective."""
    proximal_made_at: int | None = None
    """The weights before this step are the proximal policy. None: there is none, or it is the step's own policy."""


def batch_file(folder: Path, rank: int, step: int) -> Path:
    return folder / "batches" / str(rank) / f"step_{step}"


def result_file(folder: Path, name: str, rank: int) -> Path:
    return folder / "results" / f"{name}.{rank}"


def write_record(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(Codec(type(record)).encode(record))


def read_record(path: Path, record_type: type[R]) -> R:
    codec: Codec[R] = Codec(record_type)
    return codec.decode(path.read_bytes())


def link_checkpoint(run_dir: Path, folder: Path, step: int) -> None:
    name = f"step_{step}"
    (folder / CHECKPOINTS).mkdir()
    (folder / CHECKPOINTS / name).symlink_to((run_dir / CHECKPOINTS / name).resolve())


def read_results(folder: Path, name: str, num_ranks: int) -> ReplayedStep:
    """The results of all ranks as one."""
    parts = [read_record(result_file(folder, name, rank), ReplayedStep) for rank in range(num_ranks)]
    sequences = tuple(sequence for part in parts for sequence in part.sequences)
    return msgspec.structs.replace(parts[0], sequences=sequences)


def changed_settings(cfg: Config, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The typed values of changed keys of `finetune.rl`, for ``LossSettings``, and of ``share_prefixes``.

    Raises:
        ConfigError: a key is none of these, or its value is refused.
    """
    from pipelinerl.config.load import parse_container
    from pipelinerl.finetune.rl.objective import LossSettings

    known = sorted({*LossSettings.__dataclass_fields__, SHARE_PREFIXES} - {"proximal"})
    unknown = sorted(changes.keys() - set(known))
    if unknown:
        raise ConfigError(f"--with {unknown[0]}=… is no setting of the loss: there are {', '.join(known)}")
    container = cfg.model_dump(mode="json")
    for name, value in changes.items():
        section = container["finetune"] if name == SHARE_PREFIXES else container["finetune"]["rl"]
        section[name] = value
    finetune = parse_container(container).finetune
    settings = {name: getattr(finetune.rl, name) for name in changes if name != SHARE_PREFIXES}
    return settings | ({SHARE_PREFIXES: finetune.shares_prefixes} if SHARE_PREFIXES in changes else {})
