"""Names of the topics and who writes and reads them.

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
