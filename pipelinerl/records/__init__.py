"""The records that processes exchange: frozen, keyword-only ``msgspec.Struct``. Imports numpy and msgspec only.

Array fields are numpy arrays and are sent as raw bytes.
"""

from pipelinerl.records.archive import ArchivedRollout, ArchivedStep, ScoredSequence, ScoredStep
from pipelinerl.records.batches import MicroBatch
from pipelinerl.records.messages import (
    CalibrationExceeded,
    EvaluationDone,
    EvaluationStarted,
    PreprocessorProgress,
    ProbeMissed,
    ProbePassed,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.order import DataOrder, GroupOutcome, ProblemHistory
from pipelinerl.records.rollouts import (
    ActorRecord,
    BatchUnit,
    GroupDropped,
    OrderResumed,
    RewardMode,
    Rollout,
    RolloutGroup,
    TrainingSequence,
    outcome_of,
)

__all__ = [
    "ActorRecord",
    "ArchivedRollout",
    "ArchivedStep",
    "BatchUnit",
    "CalibrationExceeded",
    "DataOrder",
    "EvaluationDone",
    "EvaluationStarted",
    "GroupDropped",
    "GroupOutcome",
    "MicroBatch",
    "OrderResumed",
    "PreprocessorProgress",
    "ProbeMissed",
    "ProbePassed",
    "ProblemHistory",
    "RewardMode",
    "Rollout",
    "RolloutGroup",
    "SamplesProcessed",
    "ScoredSequence",
    "ScoredStep",
    "TrainerMessage",
    "TrainingDone",
    "TrainingResumed",
    "TrainingSequence",
    "WeightUpdateSuccess",
    "outcome_of",
]
