"""Every contract between processes. Imports numpy and msgspec only.

A record is a frozen, keyword-only ``msgspec.Struct``; array fields are numpy arrays and travel as raw bytes.
``rollouts`` is what the actor publishes, ``batches`` what the preprocessor publishes, ``messages`` what roles tell
each other, ``archive`` what stays for people, ``verdicts`` what verifiers are asked and answer, ``topics`` the names of
the topics, and ``check`` the one place that refuses a bad record.
"""

from pipelinerl.records.archive import ArchivedRollout, ArchivedStep, ScoredSequence, ScoredStep
from pipelinerl.records.batches import MicroBatch
from pipelinerl.records.messages import (
    EvaluationDone,
    EvaluationStarted,
    PreprocessorProgress,
    ProbeMissed,
    SamplesProcessed,
    TrainerMessage,
    TrainingDone,
    TrainingResumed,
    WeightUpdateSuccess,
)
from pipelinerl.records.order import DataOrder
from pipelinerl.records.rollouts import (
    ActorRecord,
    GroupDropped,
    OrderResumed,
    RewardMode,
    Rollout,
    RolloutGroup,
    TrainingSequence,
)

__all__ = [
    "ActorRecord",
    "ArchivedRollout",
    "ArchivedStep",
    "DataOrder",
    "EvaluationDone",
    "EvaluationStarted",
    "GroupDropped",
    "MicroBatch",
    "OrderResumed",
    "PreprocessorProgress",
    "ProbeMissed",
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
]
