"""Every contract between processes. Imports numpy and msgspec only.

A record is a frozen, keyword-only ``msgspec.Struct``; array fields are numpy arrays and travel as raw bytes.
``rollouts`` is what the actor publishes, ``batches`` what the preprocessor publishes, ``messages`` what roles tell
each other, ``verdicts`` what verifiers are asked and answer, ``topics`` the names of the topics, and ``check`` the one
place that refuses a bad record.
"""

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
from pipelinerl.records.rollouts import ActorRecord, GroupDropped, RewardMode, Rollout, RolloutGroup, TrainingSequence

__all__ = [
    "ActorRecord",
    "EvaluationDone",
    "EvaluationStarted",
    "GroupDropped",
    "MicroBatch",
    "PreprocessorProgress",
    "ProbeMissed",
    "RewardMode",
    "Rollout",
    "RolloutGroup",
    "SamplesProcessed",
    "TrainerMessage",
    "TrainingDone",
    "TrainingResumed",
    "TrainingSequence",
    "WeightUpdateSuccess",
]
