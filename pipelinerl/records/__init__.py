"""The records that processes exchange. Imports numpy and msgspec only.

A record is a frozen, keyword-only ``msgspec.Struct``. Array fields are numpy arrays and are sent as raw bytes.
``rollouts`` holds the actor's records, ``batches`` the preprocessor's, ``messages`` the control messages between roles,
``archive`` the records kept for people, ``verdicts`` the verifiers' requests and answers, and ``topics`` the names of
the topics. ``check`` refuses bad records.
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
