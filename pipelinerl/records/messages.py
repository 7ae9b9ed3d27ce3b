"""What roles tell each other besides data."""

import msgspec

from pipelinerl.records.order import DataOrder


class WeightUpdateSuccess(msgspec.Struct, frozen=True, kw_only=True, tag="weight_update_success"):
    """Who serves which version, as a whole; a server that is not named must not be used."""

    version: int
    """Newest version that a server serves: optimizer steps behind these weights."""
    servers: tuple[str, ...]
    """Job names of the servers that serve it, e.g. `actor_llm_0`."""
    older: dict[str, int] = {}
    """Other servers in service and the version that each still serves."""
    pause_ms: tuple[float, ...] = ()
    """Stall of decoding on each of ``servers`` when they took it, measured there."""
    transfer_ms: float = 0.0
    """From the update's start until the slowest of ``servers`` served it."""
    timestamp: float = 0.0


class ProbeMissed(msgspec.Struct, frozen=True, kw_only=True, tag="probe_missed"):
    """A server did not use the weights that it was sent: what it sampled from ``since`` on must not be trained.

    Whatever is sampled on it after a later `WeightUpdateSuccess` that names it is not meant.
    """

    server: str
    version: int
    """The version that its probe missed."""
    since: int
    """First version that its probe did not confirm."""
    is_final: bool
    """False: it is sent the weights again."""
    reason: str
    timestamp: float = 0.0


class SamplesProcessed(msgspec.Struct, frozen=True, kw_only=True, tag="samples_processed"):
    """Running totals after an optimizer step."""

    samples_processed: int
    """Rollouts trained since the start of the run (survives restarts)."""
    step: int
    """Optimizer steps completed = version now in the trainer."""
    metrics: dict[str, float] = {}
    timestamp: float = 0.0


class TrainingDone(msgspec.Struct, frozen=True, kw_only=True, tag="training_done"):
    """The trainer reached `max_train_steps`, saved, and its last weights are live."""

    step: int
    timestamp: float = 0.0


class TrainingResumed(msgspec.Struct, frozen=True, kw_only=True, tag="training_resumed"):
    """The trainer was started again: the steps after ``step`` come a second time."""

    step: int
    """Optimizer steps behind the state that was loaded."""
    repeated: int
    """Steps that had been made beyond it."""
    samples_processed: int = 0
    """Rollouts trained up to ``step``."""
    orders: dict[int, DataOrder] = {}
    """How far the problems are settled, by actor replica."""
    timestamp: float = 0.0


TrainerMessage = WeightUpdateSuccess | ProbeMissed | SamplesProcessed | TrainingDone | TrainingResumed


class PreprocessorProgress(msgspec.Struct, frozen=True, kw_only=True, tag="preprocessor_progress"):
    """Running totals of the preprocessor; the actor subtracts what was dropped from what is outstanding."""

    samples_packed: int
    samples_dropped: int
    """Rollouts that reached the preprocessor and will not be trained (filters, lag, invalid)."""
    dropped_by_reason: dict[str, int]
    step: int
    """Next optimizer step to be packed; of n preprocessors, r packs the steps with ``step % n == r``."""
    dropped_sample_ids: tuple[tuple[str, str], ...] = ()
    """(`<group_id>/<attempt>`, reason) of the drops since the last record, for the ledger."""
    dropped_by_domain: dict[str, int] = {}
    """Running totals; the actor makes up for them in its mix of domains."""
    packed_sample_ids: tuple[str, ...] = ()
    """`<group_id>/<attempt>` of the rollouts packed for step ``step - 1``, for the ledger."""
    source: tuple[int, int] = (0, 0)
    """(offset in topic `actor`, rollout index in that group) where the batch being filled begins (restart)."""
    counted_until: tuple[int, int] = (0, 0)
    """The totals count the drops of every rollout before this place; those behind it are still to be decided."""
    order: DataOrder | None = None
    """How far the problems are settled at ``source``."""


class EvaluationStarted(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_started"):
    """From here until `EvaluationDone` or the deadline no server's weights may change."""

    version: int
    deadline: float
    """Unix time after which the trainer goes on by itself."""


class EvaluationDone(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_done"):
    """Results of one evaluation, all attempts sampled by one version."""

    version: int
    success: float
    reward: float
    num_rollouts: int
    metrics: dict[str, float]
    """Per dataset: `<dataset>/success`, `<dataset>/reward`, …"""
    timestamp: float = 0.0


EvaluationMessage = EvaluationStarted | EvaluationDone
