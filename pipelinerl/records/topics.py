"""Names of the topics, with their writers and readers.

| topic           | writer       | record                 | readers                      |
|-----------------|--------------|------------------------|------------------------------|
| `actor`         | actor        | `ActorRecord`          | preprocessor, ledger         |
| `actor_test`    | actor        | `RolloutGroup`         | people                       |
| `training_data` | preprocessor | `MicroBatch`           | finetune rank = partition    |
| `preprocessor`  | preprocessor | `PreprocessorProgress` | actor (pacing), ledger       |
| `trainer`       | finetune     | `TrainerMessage`       | actor, preprocessor, launcher|
| `evaluation`    | actor        | `EvaluationMessage`    | finetune, launcher           |
"""

ACTOR = "actor"
ACTOR_TEST = "actor_test"
TRAINING_DATA = "training_data"
PREPROCESSOR = "preprocessor"
TRAINER = "trainer"
EVALUATION = "evaluation"

RETAINED_MB = {TRAINER: 64, PREPROCESSOR: 256, ACTOR_TEST: 512}
"""Minimum MB kept of the topics without named readers. Records of other topics are deleted as their readers commit.
`evaluation` needs no bound, because it gets only a few records per evaluation."""
