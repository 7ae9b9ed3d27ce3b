"""Control messages between roles."""

import msgspec

from pipelinerl.records.order import DataOrder


class WeightUpdateSuccess(msgspec.Struct, frozen=True, kw_only=True, tag="weight_update_success"):
    """The complete state of which server serves which version. Servers that are not named must not be used."""

    version: int
    """Newest version that a server serves = number of optimizer steps that made these weights."""
    servers: tuple[str, ...]
    """Job names of the servers that serve it, e.g. `actor_llm_0`."""
    older: dict[str, int] = {}
    """The other servers in service, with the version that each still serves."""
    proved: dict[str, int] = {}
    """Server in service → newest version whose weight probe is over, -1 = none. What it sampled from a newer one is
    unverified. A server that is not named is not probed."""
    pause_ms: tuple[float, ...] = ()
    """Decoding stall of each of ``servers`` during the update, measured at the server."""
    transfer_ms: float = 0.0
    """Time from the start of the update until the slowest of ``servers`` served it."""
    timestamp: float = 0.0


class ProbeMissed(msgspec.Struct, frozen=True, kw_only=True, tag="probe_missed"):
    """A server did not use the weights that it was sent. Its samples from version ``since`` on must not be trained.

    Samples that it makes after a later `WeightUpdateSuccess` names it may be trained.
    """

    server: str
    version: int
    """Version for which the probe failed."""
    since: int
    """First version that no probe confirmed."""
    is_final: bool
    """False: the trainer sends it the weights again. True: it is no longer used."""
    reason: str
    timestamp: float = 0.0


class CalibrationExceeded(msgspec.Struct, frozen=True, kw_only=True, tag="calibration_exceeded"):
    """At version 0, with the model's file at both ends, a server's log-probabilities differ too much."""

    server: str
    difference: float
    """Deviation in nats from the trainer's."""
    limit: float
    """Nats that are allowed."""
    timestamp: float = 0.0


class ProbePassed(msgspec.Struct, frozen=True, kw_only=True, tag="probe_passed"):
    """Weight probes of servers in service are over and found no fault. Changes the newest `WeightUpdateSuccess`."""

    proved: dict[str, int]
    """`WeightUpdateSuccess.proved` of the servers for which it has changed."""
    timestamp: float = 0.0


class SamplesProcessed(msgspec.Struct, frozen=True, kw_only=True, tag="samples_processed"):
    """Running totals after an optimizer step."""

    samples_processed: int
    """Rollouts trained since the start of the run, including before restarts."""
    step: int
    """Optimizer steps completed = current version in the trainer."""
    metrics: dict[str, float] = {}
    timestamp: float = 0.0


class TrainingDone(msgspec.Struct, frozen=True, kw_only=True, tag="training_done"):
    """The trainer reached `max_train_steps` and saved, and its last weights are live."""

    step: int
    timestamp: float = 0.0


class TrainingResumed(msgspec.Struct, frozen=True, kw_only=True, tag="training_resumed"):
    """The trainer was restarted and repeats the steps after ``step``."""

    step: int
    """Optimizer steps of the loaded state."""
    repeated: int
    """Number of steps after it that had been completed before the restart."""
    samples_processed: int = 0
    """Rollouts trained up to ``step``."""
    orders: dict[int, DataOrder] = {}
    """Resolved problems, by actor replica."""
    timestamp: float = 0.0


TrainerMessage = (
    WeightUpdateSuccess
    | ProbeMissed
    | CalibrationExceeded
    | ProbePassed
    | SamplesProcessed
    | TrainingDone
    | TrainingResumed
)


class PreprocessorProgress(msgspec.Struct, frozen=True, kw_only=True, tag="preprocessor_progress"):
    """Running totals of the preprocessor. The actor subtracts dropped rollouts from its outstanding ones."""

    samples_packed: int
    samples_dropped: int
    """Since the start of the run: rollouts that reached the preprocessor and will not be trained (filters, lag, …)."""
    room: int | None = None
    """Since the start of the run, in units of `finetune.batch_unit`: what came and fills no batch. It is what was
    dropped, and what batches hold beyond their size. None: ``samples_dropped``."""
    dropped_by_reason: dict[str, int]
    """Running totals, by `records.drops.DropReason` or a word of an older version."""
    step: int
    """Next optimizer step to be packed. Of n preprocessors, number r packs the steps with ``step % n == r``."""
    dropped_sample_ids: tuple[tuple[str, str], ...] = ()
    """(`<group_id>/<attempt>`, reason) of the drops since the last record, for the ledger."""
    dropped_by_domain: dict[str, int] = {}
    """Running totals. The actor compensates for them in its mix of domains."""
    packed_sample_ids: tuple[str, ...] = ()
    """`<group_id>/<attempt>` of the rollouts packed for step ``step - 1``, for the ledger."""
    source: tuple[int, int] = (0, 0)
    """(offset in topic `actor`, rollout index in that group) where the batch being filled begins (restart)."""
    counted_until: tuple[int, int] = (0, 0)
    """Same form. The totals include the drops of all rollouts before this place. Later ones are not decided yet."""
    order: DataOrder | None = None
    """Problems that are resolved at ``source``."""


class EvaluationStarted(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_started"):
    """No server's weights may change until `EvaluationDone` or the deadline."""

    version: int
    deadline: float
    """Unix time after which the trainer continues without the result."""


class EvaluationDone(msgspec.Struct, frozen=True, kw_only=True, tag="evaluation_done"):
    """Results of one evaluation. One version sampled all attempts."""

    version: int
    success: float | None
    """None if no attempt had a result."""
    reward: float | None
    num_rollouts: int
    metrics: dict[str, float]
    """`complete`: share of the attempts with a result. Per dataset: `<dataset>/success`, `<dataset>/reward`, …"""
    outcomes: dict[str, tuple[tuple[int, int], ...]] = {}
    """Per dataset, for each problem in order: attempts with a result, and how many of them succeeded."""
    timestamp: float = 0.0


EvaluationMessage = EvaluationStarted | EvaluationDone
